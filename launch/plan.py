"""How many sessions fit, from config.json alone: nothing is loaded, nothing is guessed.

Live bytes follow from the cache's shape. Packed bytes come from the cold store's own packer, so
headers, exact first tokens, the raw tail and the session record are in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from engines.config import EngineConfig
from kvstore.chain import KEY_BYTES
from kvstore.chunk_size import chunk_tokens
from kvstore.codecs.base import Codec
from kvstore.codecs.presets import PRESETS, open_codec
from kvstore.codecs.profile import Profile
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import UnknownCodec
from kvstore.format import HEADER_BYTES
from kvstore.marks import MARK_BYTES
from kvstore.packer import Packer
from kvstore.shapes import NUMPY_DTYPES, DType, KVLayout
from kvstore.tiers.ram_tier import ENTRY_BYTES
from launch.cache_shape import CacheShape
from launch.hot_room import HotRoom

BF16_BYTES = 2
GIB = 1 << 30
TOKEN_ID_BYTES = 4
RECORD_BYTES = 256  # of a session record besides its token ids: names, digests, numbers


class ColdPlan(msgspec.Struct, frozen=True):
    """One codec at one context length. ``refused`` says why there are no numbers."""

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


def live_dtype(engine: EngineConfig, content: Mapping[str, Any], widens: bool) -> DType:
    """The dtype of the live cache: what was set, what the platform forces, what the model has."""
    if engine.dtype != "auto":
        return engine.dtype
    if widens:
        return "float32"
    text = content.get("text_config") or content
    stored = text.get("dtype") or text.get("torch_dtype") or content.get("torch_dtype")
    names: tuple[DType, ...] = get_args(DType)
    return next((name for name in names if name == stored), "bfloat16")


def make_plan(
    name: str,
    content: Mapping[str, Any],
    room: HotRoom,
    dtype: DType,
    contexts: Sequence[int],
    store: StoreConfig,
    profile: Profile | None = None,
) -> Plan:
    """``contexts``: tokens per session. ``room`` and ``store`` hold the budgets. ``profile``: what
    was measured of the model."""
    shape, itemsize = room.shape, room.itemsize
    budgets = {"hot": room.hot_bytes, "ram": store.ram_bytes, "disk": store.disk_bytes}
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
        usable_context=room.longest_context(),
        wanted_context=room.wanted,
        wanted_hot_bytes=room.running_bytes(room.wanted),
        budgets=budgets,
        contexts=[_context_plan(room, dtype, n, budgets, store, profile) for n in contexts],
        notes=_notes(room),
    )


def _notes(room: HotRoom) -> list[str]:
    shape = room.shape
    notes = list(shape.notes)
    if refusal := room.refusal():
        notes.append(f"serve will refuse this: {refusal}")
    if shape.exact_only:
        notes.append(f"only the codec raw: {shape.exact_only}")
    if shape.needs_state:
        notes.append(
            "windows and recurrent state are kept exact, in snapshots; sessions resume at those"
        )
    return notes


def _context_plan(
    room: HotRoom,
    dtype: DType,
    context: int,
    budgets: Mapping[str, int],
    store: StoreConfig,
    profile: Profile | None,
) -> ContextPlan:
    cold_budgets = {tier: nbytes for tier, nbytes in budgets.items() if tier != "hot"}
    # The user's own codec is one more, and what was learned of the model.
    named = [x for x in (store.codec, store.disk_codec, store.redis_codec) if x not in ("", AUTO)]
    names = dict.fromkeys([*PRESETS, *named, *(profile.learned if profile else ())])
    return ContextPlan(
        context=context,
        hot_bytes_per_session=room.idle_bytes(context),
        hot_sessions=room.sessions(context),
        cold=[
            _cold_plan(name, room.shape, dtype, context, cold_budgets, store, profile)
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


def cold_bytes(
    shape: CacheShape, codec: Codec, dtype: DType, num_tokens: int, store: StoreConfig
) -> int:
    """All bytes that one sleeping session takes in a tier, keys and index entries included.

    Raises:
        UnknownCodec: this codec must not or cannot pack this cache.
    """
    if shape.exact_only and not codec.exact:
        raise UnknownCodec(f"codec {codec.id} is refused: {shape.exact_only}")
    layout = KVLayout(dtype, shape.growing)
    codec.check(layout)
    packer = Packer(codec, layout, "")
    size = chunk_tokens(store)
    num_chunks, tail = divmod(num_tokens, size)
    blobs = [
        packer.chunk_nbytes(min(i, 1) * size, size)
        for i in range(num_chunks if shape.growing else 0)
    ]
    if shape.needs_state:  # the newest rows then lie inside the snapshots
        state = shape.state_bytes(num_tokens, NUMPY_DTYPES[dtype].itemsize)
        blobs += [packer.tail_nbytes(tail) + state] * store.max_snapshots
    elif tail:
        blobs.append(packer.tail_nbytes(tail))
    blobs.append(HEADER_BYTES + RECORD_BYTES + TOKEN_ID_BYTES * num_tokens)
    return sum(blobs) + len(blobs) * (KEY_BYTES + MARK_BYTES + ENTRY_BYTES)
