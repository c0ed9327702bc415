"""Predicts which codec the engine will choose for sleeping sessions, and their size in a tier."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from engines.calibration.gate.choice import Choice, choose, exact
from engines.calibration.orders import TooShort, first_order, tokens_to_compute
from engines.kv_budget import HOT_CODECS, UNSTATED_CONTEXT, stated_context
from kvstore.blobs.chain import KEY_BYTES, NAME_BYTES
from kvstore.blobs.format import HEADER_BYTES
from kvstore.blobs.packer import Packer
from kvstore.codecs.base import Codec
from kvstore.codecs.names import EXACT
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows import sinks
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.stacks.fused import for_sizes_alone
from kvstore.errors import UnknownCodec
from kvstore.session import CHUNK_TOKENS, STATES_PER_SESSION, chunk_of_blocks
from kvstore.shapes import DType, KVLayout, StoredModel
from kvstore.tiers.ram_tier import ENTRY_BYTES
from launch.calibrate.profile_notes import find_profile
from launch.families.cache_shape import CacheShape, NotUnderstood
from launch.model.find import find_model
from launch.plan.served_model import served_cache, served_dtype
from launch.settings.effective_settings import EffectiveSettings

RECORD_BYTES = 256  # a session record without its chain: names, digests, numbers
ANSWER_TOKENS = 256  # assumed distance between the two states of a session
PLACE_BYTES = KEY_BYTES + ENTRY_BYTES  # a tier's key and index entry for each blob
BY_HAND = "run: thermocline calibrate"


@dataclass(frozen=True)
class ColdSize:
    """The bytes of one sleeping session in a tier, with keys and index entries.

    ``rows`` is for K and V of the tokens in full chunks. ``states`` is for kept states with the
    rows of sliding windows; only a ``SessionCodec`` packs these.
    """

    rows: int
    states: int
    record: int
    row_bytes_per_token: float  # in any full chunk but the first, without headers

    @property
    def total(self) -> int:
        return self.rows + self.states + self.record


def cold_size(
    shape: CacheShape,
    codec: Codec | SessionCodec,
    dtype: DType,
    num_tokens: int,
    chunk: int = CHUNK_TOKENS,
) -> ColdSize:
    """Return the bytes of a session of ``num_tokens``, with headers, states and session record.

    Raises:
        UnknownCodec: the codec cannot pack this cache, or is lossy where that is not allowed.
    """
    if shape.exact_only and not codec.exact:
        raise UnknownCodec(f"codec {codec.id} is refused: {shape.exact_only}")
    layout = KVLayout(dtype, shape.growing)
    session = codec if isinstance(codec, SessionCodec) else None
    codec = codec.kv if isinstance(codec, SessionCodec) else codec
    codec.check(layout)
    num_chunks = num_tokens // chunk
    rows: list[int] = []
    if shape.growing:
        packer = Packer(codec, StoredModel("", "", layout))
        rows = [packer.rows_nbytes(min(i, 1) * chunk, chunk) for i in range(num_chunks)]
    states: list[int] = []
    if shape.needs_state and num_chunks:
        end = num_chunks * chunk
        state = HEADER_BYTES + shape.kept_state_bytes(session, dtype, end)
        states = [state] * STATES_PER_SESSION + _window_chunks(shape, session, dtype, end, chunk)
    packed = codec.packed_nbytes(layout, chunk, chunk) if shape.growing else 0
    return ColdSize(
        rows=sum(rows) + len(rows) * PLACE_BYTES,
        states=sum(states) + len(states) * PLACE_BYTES,
        record=HEADER_BYTES + RECORD_BYTES + NAME_BYTES * num_chunks + PLACE_BYTES,
        row_bytes_per_token=packed / chunk,
    )


def _window_chunks(
    shape: CacheShape, session: SessionCodec | None, dtype: DType, num_tokens: int, chunk: int
) -> list[int]:
    """Return the bytes of each chunk of sliding windows' rows that a session's two states need.

    The older state is assumed one answer before the newest; rows that both need are stored once.
    """
    states = shape.states(dtype)
    if states is None or states.windows is None:
        return []
    codec = (session.windows if session is not None else None) or codec_by_name(EXACT)
    reach = min(num_tokens, states.window_tokens + ANSWER_TOKENS)
    each = sinks.packed_nbytes(codec, states.windows, chunk, chunk)
    return [HEADER_BYTES + each] * -(-reach // chunk)


def chunk_of(effective: EffectiveSettings) -> int:
    """Return the tokens per chunk that the engine will choose."""
    if effective.engine_kind != "vllm":
        return CHUNK_TOKENS
    return chunk_of_blocks(effective.settings.engine.vllm.block_tokens or 1)


def expected_choice(effective: EffectiveSettings) -> Choice:
    """Return the codec that the engine would choose.

    Raises:
        CodecRefused, UnknownCodec: see ``choose``.
        NotUnderstood: the model's cache cannot be computed from its config.json.
        UsageError, LaunchError: there is no such model.
    """
    engine, store = effective.settings.engine, effective.settings.store
    content = find_model(engine.model, effective.folders.cache).config()
    shape, profile = served_cache(effective, content), find_profile(effective)
    if shape.exact_only:
        return exact(shape.exact_only)
    layout = KVLayout(served_dtype(effective, content), shape.growing)
    if profile is not None:
        layout = profile.layout  # of one rank
    if num_bits := HOT_CODECS.get(engine.hot_codec):
        layout = PackedLayout(dtype=layout.dtype, layers=layout.layers, num_bits=num_bits)
    with for_sizes_alone():
        return choose(store.codec, store, layout, profile, states=shape.states(layout.dtype))


class Outlook(NamedTuple):
    """A prediction: the first start will measure the model or not, with details or the reason."""

    will_be: bool
    text: str


def in_words(choice: Choice) -> str:
    """Return the codec and the reason for it in words."""
    size = ", exact but large" if choice.unmeasured else ""
    return f"{choice.name}{size} ({choice.why})"


def first_measurement(effective: EffectiveSettings) -> Outlook:
    """Return whether the engine will measure this model at its first start, with details."""
    store = effective.settings.store
    if not store.calibrate:
        return Outlook(False, BY_HAND)
    content = find_model(effective.settings.engine.model, effective.folders.cache).config()
    longest = effective.settings.engine.max_context or stated_context(content)
    try:
        order = first_order(store, longest or UNSTATED_CONTEXT, "")
    except TooShort as error:
        return Outlook(False, f"it will not be measured: {error}; {BY_HAND}")
    states = None
    with suppress(NotUnderstood):
        states = served_cache(effective, content).states(served_dtype(effective, content))
    presets, thousands = ", ".join(order.presets), round(tokens_to_compute(order, states) / 1000)
    return Outlook(
        True,
        f"the engine measures it in idle moments of its first start ({presets}), about as long as"
        f" it takes to prefill {thousands} prompts of 1,000 tokens",
    )
