"""Writes the tables of docs/models.md: the bytes of sessions of published models, live and cold.

Computed by ``thermocline plan``'s arithmetic from the fields of published config.json files that
determine a cache; no model is loaded. bf16, the engine's chunks, two states per session where the
model has states. *packed* is ``dense3+state6``: windows and states packed, too, where the gate
allows it. Bits that are dealt over a state's rows take as many on average, or fewer.

    python -m benchmarks.plan_table
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstore.codecs.names import for_session
from kvstore.codecs.presets import open_codec
from kvstore.codecs.session_codec import open_session_codec
from kvstore.errors import UnknownCodec
from launch.families.cache_shape import CacheShape, ModelRefused
from launch.families.table import cache_shape
from launch.plan.cold_size import cold_size
from tests.unit.launch.plan.published import PUBLISHED

LENGTHS = (8192, 32768)
MIB = 1 << 20
HEAD = (
    *("model", "kept", "engines", "tokens", "live", "raw", "dense3"),
    *("states", "live : dense3", "packed", "states", "live : packed"),
)
PACKED = "dense3+state6"


def kept(shape: CacheShape) -> str:
    """Return in words how the layers keep their KV."""
    what = "latents" if shape.has_latents else "K and V"
    words = [f"{len(shape.growing)} {what}"] if shape.growing else []
    if shape.windows:
        longest = sorted({w.longest for w in shape.windows})
        words.append(f"{len(shape.windows)} windows of {' and '.join(map(str, longest))}")
    if shape.num_states:
        words.append(f"{shape.num_states} states")
    return ", ".join(words)


def engines(config: dict[str, Any]) -> str:
    """Return "both" if vLLM keeps sessions in the same live bytes as mlx, else "mlx"."""
    try:
        on_vllm = cache_shape(config, "vllm")
    except ModelRefused:
        return "mlx"
    return "both" if on_vllm == cache_shape(config) else "mlx"


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each model and length; sizes in bytes, None where a codec is refused."""
    for name, config in sorted(PUBLISHED.items(), key=lambda x: x[0].lower()):
        shape = cache_shape(config)
        for num_tokens in LENGTHS:
            live = shape.hot_bytes(num_tokens, 2)
            cold = {codec: _cold(shape, codec, num_tokens) for codec in ("raw", "dense3")}
            states = shape.states("bfloat16")
            packed = _packed(shape, num_tokens) if states else (*cold["dense3"],)
            yield {
                "model": name,
                "kept": kept(shape),
                "engines": engines(config),
                "tokens": num_tokens,
                "live_bytes": live,
                "raw_bytes": cold["raw"][0],
                "dense3_bytes": cold["dense3"][0],
                "state_bytes": cold["raw"][1],
                "packed_bytes": packed[0],
                "packed_state_bytes": packed[1],
            }


def _packed(shape: CacheShape, num_tokens: int) -> tuple[int | None, int]:
    """Return the bytes with windows and states packed, too, as on mlx within the bound."""
    states = shape.states("bfloat16")
    assert states is not None
    name = for_session(PACKED, states.windows is not None, states.has_matrices)
    try:
        codec = open_session_codec(name, None, states)
        size = cold_size(shape, codec, "bfloat16", num_tokens)
    except UnknownCodec:
        return None, 0
    return size.total, size.states


def _cold(shape: CacheShape, codec: str, num_tokens: int) -> tuple[int | None, int]:
    try:
        size = cold_size(shape, open_codec(codec, None), "bfloat16", num_tokens)
    except UnknownCodec:
        return None, 0
    return size.total, size.states


def _mib(nbytes: int | None) -> str:
    return "refused" if nbytes is None else f"{nbytes / MIB:.1f}"


def markdown() -> Iterator[str]:
    yield "| " + " | ".join(HEAD) + " |"
    yield "|---|---|---|" + "---:|" * (len(HEAD) - 3)
    before = ""
    for row in rows():
        first = [row["model"], row["kept"], row["engines"]] if row["model"] != before else [""] * 3
        before, dense = row["model"], row["dense3_bytes"]
        sizes = [_mib(row[f"{x}_bytes"]) for x in ("live", "raw", "dense3", "state")]
        more = [_mib(row[f"{x}_bytes"]) for x in ("packed", "packed_state")]
        ratios = [_ratio(row["live_bytes"], x) for x in (dense, row["packed_bytes"])]
        figures = [*sizes, ratios[0], *more, ratios[1]]
        yield "| " + " | ".join([*first, str(row["tokens"]), *figures]) + " |"


def _ratio(live: int, asleep: int | None) -> str:
    return "" if asleep is None else f"{live / asleep:.2f}"


if __name__ == "__main__":
    print("\n".join(markdown()))
