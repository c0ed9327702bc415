"""Products of queries with packed keys beside restoring first, fp32 and bf16; draws a picture.

    python -m benchmarks.attention_scores [--methods tq3,tq4] [--tokens 128,1024] [--dims 64,128]
        [--queries 1,2,4,8] [--json OUT] [--plot docs/pictures/attention-scores.png]

One thread, four heads, keys of several layers in turn, so that they are as cold as in a model. A
cell is the time of all products over that of the same products with fp32 keys by numpy's BLAS, in
one process: on a shared machine only ratios within one run mean anything. Keys are multiplied 256
at a time. *restore* unpacks to fp32 and multiplies; *bf16* widens keys and multiplies.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

import thermocline
from benchmarks.markdown import table
from kvstore.codecs.floats import round_to_bf16, widen

HEADS: Final = 4
COLD_BYTES: Final = 64 << 20  # of fp32 keys, if so few layers have them
MOST_LAYERS: Final = 24
BLOCK_TOKENS: Final = 256  # in a product: BLAS takes several times as long for a few long rows
TOKENS: Final = tuple(128 << k for k in range(8))  # 128 to 16K
ENOUGH_S: Final = 0.4
GREY: Final = "#8d99ae"
COLORS: Final = ("#2e86ab", "#c44536", "#0b3954")


@dataclass(frozen=True)
class Point:
    """The time of one way to multiply, for one shape."""

    dim: int
    tokens: int
    queries: int
    way: str
    ns_per_key: float
    x_fp32: float  # times the time with fp32 keys; below one is faster


def measure(method_names: Sequence[str], dim: int, tokens: int, queries: int) -> list[Point]:
    """Time all ways for one shape."""
    rng = np.random.default_rng(tokens)
    layers = max(1, min(MOST_LAYERS, COLD_BYTES // (HEADS * tokens * dim * 4)))
    keys = rng.standard_normal((layers, HEADS, tokens, dim), np.float32)
    query = rng.standard_normal((HEADS, queries, dim), np.float32)
    stored = round_to_bf16(keys)
    ways: dict[str, Callable[[int], np.ndarray]] = {
        "fp32": lambda i: by_blocks(query, keys[i]),
        "bf16": lambda i: by_blocks(query, stored[i]),
    }
    for name in method_names:
        method = thermocline.codec(name)
        packed = [method.pack(layer, first_token=4) for layer in keys]
        ways[name] = lambda i, m=method, p=packed: m.scores(query, p[i])  # type: ignore[misc]
        ways[f"{name}, restore"] = lambda i, m=method, p=packed: by_blocks(  # type: ignore[misc]
            query, m.restore(p[i])
        )
    seconds = {way: min(_rounds(work, layers)) for way, work in ways.items()}
    num_keys = HEADS * tokens
    return [
        Point(dim, tokens, queries, way, 1e9 * taken / num_keys, taken / seconds["fp32"])
        for way, taken in seconds.items()
    ]


def by_blocks(query: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Multiply fp32 keys, or bf16 ones as uint16, with BLAS's kernels for small matrices."""
    out = np.empty((HEADS, query.shape[1], stored.shape[1]), np.float32)
    for head in range(HEADS):
        for first in range(0, stored.shape[1], BLOCK_TOKENS):
            block = slice(first, first + BLOCK_TOKENS)
            wide = stored[head, block]
            if wide.dtype == np.uint16:
                wide = widen(wide, "bfloat16")
            np.matmul(query[head], wide.T, out=out[head, :, block])
    return out


def _rounds(work: Callable[[int], object], layers: int) -> Iterator[float]:
    """Yield the seconds of one layer's products in each round; the first round warms up."""
    for layer in range(layers):
        work(layer)
    begun = time.perf_counter()
    while True:
        before = time.perf_counter()
        for layer in range(layers):
            work(layer)
        yield (time.perf_counter() - before) / layers
        if time.perf_counter() - begun > ENOUGH_S:
            return


def rows_of(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Return the head of a table and its rows: one for each shape, a column for each way."""
    ways = [x for x in dict.fromkeys(point.way for point in points) if x != "fp32"]
    shapes = dict.fromkeys((x.dim, x.queries, x.tokens) for x in points)
    found = {(x.dim, x.queries, x.tokens, x.way): f"{x.x_fp32:.2f}" for x in points}
    head = ["dim", "queries", "tokens", *ways]
    return head, [[*map(str, shape), *(found[*shape, way] for way in ways)] for shape in shapes]


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw times over those with fp32 keys: a row of panels for each dimension."""
    from matplotlib.figure import Figure

    dims, queries = (sorted({getattr(x, name) for x in points}) for name in ("dim", "queries"))
    ways = [x for x in dict.fromkeys(point.way for point in points) if x != "fp32"]
    size = (2.9 * len(queries), 2.6 * len(dims) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(dims), len(queries), sharex=True, sharey=True, squeeze=False)
    for row, dim in zip(panels, dims, strict=True):
        for axes, count in zip(row, queries, strict=True):
            for number, way in enumerate(ways):
                of_way = [x for x in points if (x.dim, x.queries, x.way) == (dim, count, way)]
                style = "--" if way.endswith("restore") else "-"
                color = COLORS[(number - 1) // 2 % len(COLORS)] if number else GREY
                x, y = [p.tokens for p in of_way], [p.x_fp32 for p in of_way]
                axes.plot(x, y, style, color=color, label=way)
            axes.axhline(1, color="black", linewidth=0.6)
            axes.set(xscale="log", yscale="log")
            axes.set_title(f"{dim} values, {count} quer{'y' if count == 1 else 'ies'}", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("keys of a head", fontsize=9)
    figure.supylabel("time / fp32", fontsize=9)
    figure.legend(
        *panels[0][0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=5,
        frameon=False,
    )
    figure.savefig(path, dpi=120, facecolor="white")


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--methods", default="tq3,tq4")
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS))
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--queries", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # read when numpy is imported
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        command = [sys.executable, "-m", "benchmarks.attention_scores", *sys.argv[1:]]
        os.execv(sys.executable, command)
    points = [
        point
        for dim in arguments.dims
        for queries in arguments.queries
        for tokens in arguments.tokens
        for point in measure(arguments.methods.split(","), dim, tokens, queries)
    ]
    print("\n".join(table(*rows_of(points))))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(x) for x in points], indent=1) + "\n")
    if arguments.plot:
        draw(points, arguments.plot)


if __name__ == "__main__":
    main()
