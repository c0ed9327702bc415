"""From settings to a plan, and to a refusal of budgets that no plan could follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engines.kv_budget import UNSTATED_CONTEXT, stated_context
from engines.packed_budget import HOT_CODECS, packed_cost
from kvstore.chunk_size import SMALL_TOKENS, chunk_tokens
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.shapes import NUMPY_DTYPES
from launch.cache_shape import CacheShape, NotUnderstood
from launch.effective import Effective
from launch.errors import LaunchError, UsageError
from launch.families import cache_shape
from launch.hot_room import HotRoom
from launch.measured import likely_choice, recall
from launch.model import Model, find_model
from launch.plan import Plan, live_dtype, make_plan

MOST_TOKENS = 1 << 24
USUAL = (2048, 8192, 32768)


def plan_of(effective: Effective, contexts: str | None) -> Plan:
    """``contexts``: numbers of tokens, separated by commas; None = usual ones.

    Raises:
        UsageError: not such numbers, or no model.
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
        hot_room(effective, content, shape),
        live_dtype(settings.engine, content, effective.widens),
        lengths,
        _as_saved(effective),
        recall(effective),
    )
    return msgspec.structs.replace(plan, notes=[*plan.notes, _codec_note(effective)])


def _codec_note(effective: Effective) -> str:
    given = effective.settings.store.codec
    try:
        choice = likely_choice(effective)
    except (CodecRefused, UnknownCodec) as error:
        return f"serve will refuse codec {given}: {error}"
    return f"codec {given} is {choice.name} here: {choice.why}"


def _as_saved(effective: Effective) -> StoreConfig:
    """The store's settings with the size of chunks that this engine will choose."""
    store = effective.settings.store
    if effective.engine_kind != "vllm":
        return store
    block_tokens = effective.settings.engine.vllm.block_tokens or SMALL_TOKENS
    return msgspec.structs.replace(store, chunk_tokens=chunk_tokens(store, block_tokens))


def check_hot(effective: Effective, model: Model) -> None:
    """Refuse a budget for live KV that the engine would refuse, before it reads the weights.

    Raises:
        UsageError: it is too little; says how much is needed.
    """
    if effective.engine_kind not in ("mlx", "vllm") or model.folder is None:
        return
    content = model.config()
    try:
        shape = cache_shape(content)
    except NotUnderstood:  # the engine looks at the real cache and decides for itself
        return
    if refusal := hot_room(effective, content, shape).refusal():
        raise UsageError(f"engine.{refusal}")


def hot_room(effective: Effective, content: Mapping[str, Any], shape: CacheShape) -> HotRoom:
    """``content``: the model's config.json."""
    engine = effective.settings.engine
    longest = stated_context(content) or UNSTATED_CONTEXT
    itemsize = NUMPY_DTYPES[live_dtype(engine, content, effective.widens)].itemsize
    bits = HOT_CODECS.get(engine.hot_codec)
    packed = bits and packed_cost(shape.growing, bits, itemsize, engine.prefill_step)
    return HotRoom(
        shape,
        itemsize,
        engine.hot_bytes,
        wanted=min(engine.max_context or longest, longest),
        pays_for_work=effective.engine_kind == "mlx",
        asked_for=engine.max_context > 0,
        packed=packed or None,
    )


def _lengths(text: str | None, longest: int | None) -> list[int]:
    limit = longest or MOST_TOKENS
    if text is None:
        return [length for length in USUAL if length <= limit] or [limit]
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--context {text}: write numbers of tokens, such as 2048,8192") from None
    for length in lengths:
        if not 0 < length <= limit:
            raise UsageError(f"--context {length}: this model takes 1 to {limit} tokens")
    return lengths
