"""How many sessions fit, from config.json alone: nothing is loaded, nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engines.kv_budget import stated_context
from kvstore.chunk_size import SMALL_TOKENS, chunk_tokens
from kvstore.codecs.names import READY
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.shapes import DType
from launch.calibrate.profile_notes import find_profile
from launch.errors import LaunchError, UsageError
from launch.model import find_model
from launch.plan.cache_shape import CacheShape, NotUnderstood
from launch.plan.cold_size import cold_bytes
from launch.plan.expected_codec import expected_choice
from launch.plan.families.table import cache_shape
from launch.plan.hot_budget import HotBudget, hot_budget_of, live_dtype
from launch.settings.effective_settings import EffectiveSettings

BF16_BYTES = 2
GIB = 1 << 30
MOST_TOKENS = 1 << 24
USUAL_CONTEXTS = (2048, 8192, 32768)


class ColdPlan(msgspec.Struct, frozen=True):
    """The bytes of sessions of one length with one codec; ``refused``: why there are none."""

    codec: str
    kl: float | None = None  # the worst that was measured of it on this model; None: it was not
    refused: str = ""
    bytes_per_session: int = 0
    times_smaller_than_bf16: float = 0.0
    sessions_per_gib: int = 0
    sessions: dict[str, int] = {}


class ContextPlan(msgspec.Struct, frozen=True):
    context: int
    hot_bytes_per_session: int  # between turns
    hot_sessions: int  # while one of them is being answered
    cold: list[ColdPlan]


class Plan(msgspec.Struct, frozen=True):
    model: str
    model_type: str
    dtype: str  # of the live cache
    growing_layers: int
    window_layers: int
    live_bytes_per_token: int  # of the growing layers
    state_bytes: int  # windows (full) and recurrent state
    usable_context: int  # tokens that the hot budget allows a session
    wanted_context: int  # tokens that the model, or the settings, allow it
    wanted_hot_bytes: int  # the budget that allows as much
    budgets: dict[str, int]
    contexts: list[ContextPlan]
    notes: list[str]


def plan_of(effective: EffectiveSettings, contexts: str | None) -> Plan:
    """The plan for the model and budgets of these settings.

    Args:
        contexts: tokens per session, separated by commas; None = usual ones.

    Raises:
        UsageError: ``contexts`` are not such numbers, or there is no such model.
        LaunchError: the model's cache is not understood; says why.
    """
    settings = effective.settings
    model = find_model(settings.engine.model, effective.folders.cache)
    content = model.config()
    lengths = _lengths(contexts, stated_context(content))
    try:
        shape = cache_shape(content)
    except NotUnderstood as error:
        raise LaunchError(f"{model.name} cannot be planned: {error}") from error
    plan = make_plan(
        settings.engine.served_model_name or model.name,
        content,
        hot_budget_of(effective, content, shape),
        live_dtype(settings.engine, content, effective.widens),
        lengths,
        _as_saved(effective),
        find_profile(effective),
    )
    return msgspec.structs.replace(plan, notes=[*plan.notes, _codec_note(effective)])


def _codec_note(effective: EffectiveSettings) -> str:
    given = effective.settings.store.codec
    try:
        choice = expected_choice(effective)
    except (CodecRefused, UnknownCodec) as error:
        return f"serve will refuse codec {given}: {error}"
    return f"codec {given} is {choice.name} here: {choice.why}"


def _as_saved(effective: EffectiveSettings) -> StoreConfig:
    """The store's settings with the size of chunks that this engine will choose."""
    store = effective.settings.store
    if effective.engine_kind != "vllm":
        return store
    block_tokens = effective.settings.engine.vllm.block_tokens or SMALL_TOKENS
    return msgspec.structs.replace(store, chunk_tokens=chunk_tokens(store, block_tokens))


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
    name: str,
    content: Mapping[str, Any],
    hot: HotBudget,
    dtype: DType,
    contexts: Sequence[int],
    store: StoreConfig,
    profile: Profile | None = None,
) -> Plan:
    """The plan of a model for each length of session in ``contexts`` (tokens).

    Args:
        name: of the model, as clients call it.
        content: its config.json.
        hot: the budget for live KV, and the cache's shape.
        dtype: of the live cache.
        store: the budgets of the tiers.
        profile: what was measured of the model; None = nothing.
    """
    shape, itemsize = hot.shape, hot.itemsize
    budgets = {"hot": hot.hot_bytes, "ram": store.ram_bytes, "disk": store.disk_bytes}
    if store.redis_url:
        budgets["redis"] = store.redis_bytes
    longest = max((w.longest for w in shape.windows), default=0)
    return Plan(
        model=name,
        model_type=str(content.get("model_type")),
        dtype=dtype,
        growing_layers=len(shape.growing),
        window_layers=len(shape.windows),
        live_bytes_per_token=shape.elements_per_token * itemsize,
        state_bytes=shape.state_bytes(longest, itemsize),
        usable_context=hot.longest_context(),
        wanted_context=hot.wanted_context,
        wanted_hot_bytes=hot.running_bytes(hot.wanted_context),
        budgets=budgets,
        contexts=[_context_plan(hot, dtype, n, budgets, store, profile) for n in contexts],
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
            "windows and recurrent state are kept exact, in snapshots; sessions resume at those"
        )
    return notes


def _context_plan(
    hot: HotBudget,
    dtype: DType,
    context: int,
    budgets: Mapping[str, int],
    store: StoreConfig,
    profile: Profile | None,
) -> ContextPlan:
    cold_budgets = {tier: nbytes for tier, nbytes in budgets.items() if tier != "hot"}
    # Beside the presets: the codecs in the settings, and those that learned this model.
    named = [x for x in (store.codec, store.disk_codec, store.redis_codec) if x not in ("", AUTO)]
    names = dict.fromkeys([*READY, *named, *(profile.learned if profile else ())])
    return ContextPlan(
        context=context,
        hot_bytes_per_session=hot.idle_bytes(context),
        hot_sessions=hot.sessions(context),
        cold=[
            _cold_plan(name, hot.shape, dtype, context, cold_budgets, store, profile)
            for name in names
        ],
    )


def _cold_plan(
    name: str,
    shape: CacheShape,
    dtype: DType,
    context: int,
    budgets: Mapping[str, int],
    store: StoreConfig,
    profile: Profile | None,
) -> ColdPlan:
    try:
        codec = open_codec(name, profile)
        nbytes = cold_bytes(shape, codec, dtype, context, store)
    except UnknownCodec as error:
        return ColdPlan(name, refused=str(error))
    rows = [x for x in (profile.rows if profile else ()) if x.codec_id == codec.id]
    return ColdPlan(
        codec=name,
        kl=max((x.kl for x in rows), default=None),
        bytes_per_session=nbytes,
        times_smaller_than_bf16=round(shape.hot_bytes(context, BF16_BYTES) / nbytes, 2),
        sessions_per_gib=GIB // nbytes,
        sessions={tier: budget // nbytes for tier, budget in budgets.items()},
    )
