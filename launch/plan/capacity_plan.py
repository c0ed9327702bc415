"""Computes how many sessions fit from config.json alone, without loading the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engines.calibration.gate.choice import Choice
from engines.kv_budget import stated_context
from kvstore.codecs.base import Codec
from kvstore.codecs.names import CODECS, READY, USUAL, family_of, first_part, for_session
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.session_codec import SessionCodec, open_session_codec
from kvstore.codecs.stacks.fused import for_sizes_alone
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.session import CHUNK_TOKENS, STATES_PER_SESSION
from kvstore.shapes import DType, KVLayout
from launch.calibrate.profile_notes import find_profile
from launch.errors import LaunchError, UsageError
from launch.families.cache_shape import CacheShape, NotUnderstood
from launch.families.weights import estimated_weights
from launch.model.find import Model, find_model
from launch.plan.cold_size import chunk_of, cold_size, expected_choice, first_measurement
from launch.plan.served_model import (
    HotBudget,
    check_family,
    check_hot_codec,
    hot_budget_of,
    served_cache,
    served_dtype,
    too_large_here,
)
from launch.settings.budgets import weights_bytes
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.units import show_bytes

BF16_BYTES = 2
GIB = 1 << 30
ELSEWHERE = (
    "there is no GPU here: counted in {dtype}, as the profile's GPU serves it; budgets that the"
    " profile does not set are fitted to this machine"
)
MOST_TOKENS = 1 << 24
USUAL_CONTEXTS = (2048, 8192, 32768)


class ColdPlan(msgspec.Struct, frozen=True):
    """The bytes of sessions of one length with one codec."""

    codec: str
    kl: float | None = None  # the largest that was measured on this model; None: not measured
    refused: str = ""  # why the codec cannot pack this model's cache; all sizes are 0 then
    bytes_per_session: int = 0
    state_bytes: int = 0  # the part of ``bytes_per_session`` that is kept states
    kv_bytes_per_token: float = 0.0  # packed K and V of the growing layers
    kv_times_smaller_than_bf16: float = 0.0  # for the growing layers only
    times_smaller_than_bf16: float = 0.0  # for the whole session
    sessions_per_gib: int = 0
    sessions: dict[str, int] = {}


class TierPlan(msgspec.Struct, frozen=True):
    """The size of a session of one length in one tier, packed with the codec that will serve."""

    tier: str
    codec: str
    bytes_per_session: int
    state_bytes: int
    times_smaller_than_live: float
    sessions: int


class ContextPlan(msgspec.Struct, frozen=True):
    context: int
    hot_bytes_per_session: int  # between turns
    hot_sessions: int  # while one of them is being answered
    without_sleep: int  # hot sessions if live KV also had the memory of the packed sessions
    served: list[TierPlan]  # what ``serve`` will do
    cold: list[ColdPlan]  # what each codec would do

    @property
    def alive(self) -> int:
        """The number of sessions that are kept: hot, or asleep in the tier that holds most.

        0 if the hot budget is too small to answer even one.
        """
        if not self.hot_sessions:
            return 0
        return max([self.hot_sessions, *(x.sessions for x in self.served)])


class Memory(msgspec.Struct, frozen=True):
    """The planned use of the memory that holds weights and live KV, in bytes."""

    free: int  # free now; the three below add up to it
    reserve: int  # for the system and for temporary arrays
    weights: int
    kv: int  # live KV, and packed sessions if they are in the same memory


class CapacityPlan(msgspec.Struct, frozen=True):
    model: str
    model_type: str
    engine: str
    dtype: str  # of the live cache
    growing_layers: int
    window_layers: int
    state_layers: int  # recurrent ones
    live_bytes_per_token: int  # of the growing layers
    state_bytes: int  # full windows and recurrent state
    states_kept: int  # states that a cold session keeps; 0 = its cache can be cut at any token
    usable_context: int  # tokens of the longest session that the hot budget holds
    wanted_context: int  # tokens of the longest session that the model and the settings allow
    wanted_hot_bytes: int  # the hot budget that holds ``wanted_context``
    budgets: dict[str, int]
    contexts: list[ContextPlan]
    notes: list[str]
    refused: str = ""  # why the model cannot be loaded here
    memory: Memory | None = None  # None: unknown


def plan_of(effective: EffectiveSettings, contexts: str | None) -> CapacityPlan:
    """Return the plan for the model and the budgets of these settings.

    Args:
        contexts: tokens per session, separated by commas; None = the usual lengths.

    Raises:
        UsageError: ``contexts`` is malformed, there is no such model, or ``serve`` would refuse
            these settings for it.
        LaunchError: the model's cache is not understood; the message says why.
    """
    settings = effective.settings
    model = find_model(settings.engine.model, effective.folders.cache)
    content = model.config()
    lengths = _lengths(contexts, stated_context(content))
    check_family(effective, model)
    check_hot_codec(effective, model)
    try:
        shape = served_cache(effective, content)
    except NotUnderstood as error:
        raise LaunchError(f"{model.name} cannot be planned: {error}") from error
    dtype = served_dtype(effective, content)
    choice, note = _choice(effective, shape, dtype)
    sessions = SessionSizes(
        hot_budget_of(effective, content, shape),
        dtype,
        settings.store,
        find_profile(effective),
        choice,
        chunk_of(effective),
        shares_memory=not effective.hot_on_gpu,
    )
    plan = make_plan(settings.engine.served_model_name or model.name, content, sessions, lengths)
    if effective.planned_weights is not None:
        note = [*note, f"weights of {show_bytes(effective.planned_weights)}, as asked for"]
    elif model.folder is not None and weights_bytes(model.folder, widened=False) is None:
        note = [*note, _weights_note(content)]
    if effective.assumes_gpu:
        note = [*note, ELSEWHERE.format(dtype=plan.dtype)]
    return msgspec.structs.replace(
        plan,
        engine=effective.engine_kind,
        notes=[*plan.notes, *note],
        refused=too_large_here(effective),
        memory=_memory(effective, model, content),
    )


def _memory(
    effective: EffectiveSettings, model: Model, content: Mapping[str, Any]
) -> Memory | None:
    """Return the planned use of memory.

    None if the weights are unknown, do not fit with KV, or a GPU is assumed that is not here.
    """
    weights = effective.planned_weights
    if weights is None and model.folder is not None:
        weights = weights_bytes(model.folder, effective.widens)
    if weights is None and (stored := estimated_weights(content)):
        weights = stored * (2 if effective.widens else 1)
    settings = effective.settings
    kv = settings.engine.hot_bytes + (0 if effective.hot_on_gpu else settings.store.ram_bytes)
    if weights is None or effective.assumes_gpu or weights + kv > effective.room:
        return None
    return Memory(effective.room, effective.room - weights - kv, weights, kv)


def _weights_note(content: Mapping[str, Any]) -> str:
    if nbytes := estimated_weights(content):
        return f"the weights are not here: {show_bytes(nbytes)}, estimated from config.json"
    return "the weights are not here, and cannot be estimated: half of the memory is set aside"


def _choice(
    effective: EffectiveSettings, shape: CacheShape, dtype: DType
) -> tuple[Choice | None, list[str]]:
    """Return the codec that ``serve`` will use (None = it will refuse), and the notes on it.

    If the first start will measure the model, this is the codec that most models get.
    """
    given = effective.settings.store.codec
    try:
        choice = expected_choice(effective)
    except (CodecRefused, UnknownCodec) as error:
        return None, [f"serve will refuse codec {given}: {error}"]
    if choice.unmeasured and given == AUTO and first_measurement(effective).will_be:
        with suppress(UnknownCodec):
            codec = open_codec(USUAL)
            codec.check(KVLayout(dtype, shape.growing))
            why = "until the first start has measured this model, sessions sleep exactly"
            return Choice(USUAL, codec, why), [f"counted with {USUAL}, as most models get; {why}"]
    return choice, [f"codec {given} is {choice.name} here: {choice.why}"]


def _lengths(text: str | None, longest: int | None) -> list[int]:
    limit = longest or MOST_TOKENS
    if text is None:
        return [length for length in USUAL_CONTEXTS if length <= limit] or [limit]
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--context {text}: write numbers of tokens, such as 2048,8192") from None
    for length in lengths:
        if not 0 < length <= limit:
            raise UsageError(f"--context {length}: this model takes 1 to {limit} tokens")
    return lengths


def make_plan(
    name: str, content: Mapping[str, Any], sessions: SessionSizes, contexts: Sequence[int]
) -> CapacityPlan:
    """Return the plan of a model for each length of session in ``contexts`` (tokens).

    Args:
        name: the model's name for clients.
        content: the model's config.json.
    """
    hot = sessions.hot
    shape, itemsize = hot.shape, hot.itemsize
    longest = max((w.longest for w in shape.windows), default=0)
    return CapacityPlan(
        model=name,
        model_type=str(content.get("model_type")),
        engine="",
        dtype=sessions.dtype,
        growing_layers=len(shape.growing),
        window_layers=len(shape.windows),
        state_layers=shape.num_states,
        live_bytes_per_token=shape.elements_per_token * itemsize,
        state_bytes=shape.state_bytes(longest, itemsize),
        states_kept=STATES_PER_SESSION if shape.needs_state else 0,
        usable_context=hot.longest_context(),
        wanted_context=hot.wanted_context,
        wanted_hot_bytes=hot.running_bytes(hot.wanted_context),
        budgets={"hot": hot.hot_bytes, **sessions.cold_budgets},
        contexts=[sessions.plan(n) for n in contexts],
        notes=_notes(hot),
    )


def _notes(hot: HotBudget) -> list[str]:
    shape = hot.shape
    notes = list(shape.notes)
    if refusal := hot.refusal():
        notes.append(f"serve will refuse this: {refusal}")
    if shape.exact_only:
        notes.append(f"only the codec raw: {shape.exact_only}")
    if shape.needs_state:
        notes.append(
            "windows and recurrent state are packed where that was measured: a cold session has"
            f" {STATES_PER_SESSION} of them, and resumes at those"
        )
    return notes


@dataclass(frozen=True)
class SessionSizes:
    """Computes the bytes of one model's sessions, of any length, and how many fit the budgets."""

    hot: HotBudget
    dtype: DType  # of the live cache
    store: StoreConfig  # the budgets of the tiers
    profile: Profile | None = None  # the model's profile, if it was measured
    choice: Choice | None = None  # the codec that will serve; None = ``serve`` will refuse
    chunk: int = CHUNK_TOKENS
    shares_memory: bool = True  # live KV and the tier in RAM are in the same memory

    @property
    def cold_budgets(self) -> dict[str, int]:
        """The bytes of each tier; Redis has no budget of ours."""
        return {"ram": self.store.ram_bytes, "disk": self.store.disk_bytes}

    def plan(self, num_tokens: int) -> ContextPlan:
        """Return the plan of sessions of ``num_tokens``."""
        store, learned = self.store, self.profile.learned if self.profile else ()
        # Besides the presets, also the codec in the settings and those that learned this model.
        names = [*READY, *([] if store.codec == AUTO else [store.codec])]
        names += [x for x in learned if family_of(x) in CODECS]
        awake = self.hot.hot_bytes + (store.ram_bytes if self.shares_memory else 0)
        return ContextPlan(
            context=num_tokens,
            hot_bytes_per_session=self.hot.idle_bytes(num_tokens),
            hot_sessions=self.hot.sessions(num_tokens),
            without_sleep=replace(self.hot, hot_bytes=awake).sessions(num_tokens),
            served=self._served(num_tokens),
            cold=[self._cold(x, num_tokens) for x in dict.fromkeys(names)],
        )

    def _served(self, num_tokens: int) -> list[TierPlan]:
        if self.choice is None or (cold := self._cold(self.choice.name, num_tokens)).refused:
            return []
        smaller = round(self.hot.idle_bytes(num_tokens) / cold.bytes_per_session, 2)
        size = (cold.bytes_per_session, cold.state_bytes, smaller)
        return [TierPlan(x, self.choice.name, *size, cold.sessions[x]) for x in self.cold_budgets]

    def _cold(self, name: str, num_tokens: int) -> ColdPlan:
        shape, states = self.hot.shape, self.hot.shape.states(self.dtype)
        try:
            with for_sizes_alone():
                codec: Codec | SessionCodec = open_codec(first_part(name), self.profile)
                if states is not None:
                    name = for_session(name, states.windows is not None, states.has_matrices)
                    codec = open_session_codec(name, self.profile, states)
            size = cold_size(shape, codec, self.dtype, num_tokens, self.chunk)
        except UnknownCodec as error:
            return ColdPlan(name, refused=str(error))
        measured = self.profile.rows if self.profile else ()
        live = shape.elements_per_token * BF16_BYTES
        packed = size.row_bytes_per_token
        return ColdPlan(
            codec=name,
            kl=max((x.kl for x in measured if x.codec_id == codec.id), default=None),
            bytes_per_session=size.total,
            state_bytes=size.states,
            kv_bytes_per_token=round(packed, 2),
            kv_times_smaller_than_bf16=round(live / packed, 2) if packed else 0.0,
            times_smaller_than_bf16=round(shape.hot_bytes(num_tokens, BF16_BYTES) / size.total, 2),
            sessions_per_gib=GIB // size.total,
            sessions={tier: nbytes // size.total for tier, nbytes in self.cold_budgets.items()},
        )
