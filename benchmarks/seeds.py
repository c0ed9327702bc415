"""Measures claims of the four projects from which this one grew, and of the papers they use.

    python -m benchmarks.seeds [--write docs/seeds.md] [--json OUT]

Rows are random: normal ones, as the projects assume, and *uneven* ones, normal with a different
size for each channel (lognormal, sigma 1), as in keys of models. Bits are those of one token more,
without the first tokens that every method keeps in 16 bits. Losses on a model are in
``benchmarks.methods``. ``--write`` replaces the table between the two marks of a page.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

import thermocline
from benchmarks.program import options_of, replace_table, table, write_json

TOKENS: Final = 1024
FIRST: Final = 128  # tokens that are left out of cosines
HEAD: Final = ("project", "claim", "measured here", "verdict")
HOLDS, IN_PART, WRONG = "holds", "in part", "does not hold"


@dataclass(frozen=True)
class Claim:
    """One claim, what was measured, and the verdict on it."""

    project: str
    claim: str
    measured: str
    verdict: str


def rows_of(dim: int, *, uneven: bool = False) -> np.ndarray:
    """Return random rows, fp32 (2, tokens, dim)."""
    rng = np.random.default_rng(dim)
    rows = rng.standard_normal((2, 2 * TOKENS, dim), dtype=np.float32)
    return rows * np.exp(rng.standard_normal(dim, dtype=np.float32)) if uneven else rows


def plain(name: str) -> thermocline.Method:
    """Return a method without compiled kernels: these would be compiled for each dimension."""
    try:
        return thermocline.codec(name, backend="numpy")
    except ValueError:  # it has none
        return thermocline.codec(name)


def bits(name: str, dim: int) -> float:
    """Return the bits per value of one token more, scales included."""
    method, rows = plain(name), rows_of(dim)
    more = method.pack(rows).nbytes - method.pack(rows[:, :TOKENS]).nbytes
    return float(8 * more / (TOKENS * rows.shape[0] * dim))


def ratio(name: str, dim: int) -> str:
    """Return the ratio of bf16 to a method's rows as text, such as "5.12x"."""
    return f"{16 / bits(name, dim):.2f}x"


def cosine(name: str, dim: int, *, uneven: bool = False) -> float:
    """Return the mean cosine of rows and the same rows restored."""
    method, rows = plain(name), rows_of(dim, uneven=uneven)[:, :TOKENS]
    back = method.restore(method.pack(rows))[:, FIRST:].astype(np.float64)
    rows = rows[:, FIRST:].astype(np.float64)
    sizes = np.linalg.norm(rows, axis=2) * np.linalg.norm(back, axis=2)
    return float(np.mean(np.sum(rows * back, axis=2) / sizes))


def error(name: str, dim: int) -> float:
    """Return the squared error of uneven rows over their squares."""
    method, rows = plain(name), rows_of(dim, uneven=True)
    back = method.restore(method.pack(rows))[:, FIRST:].astype(np.float64)
    rows = rows[:, FIRST:].astype(np.float64)
    return float(np.sum((rows - back) ** 2) / np.sum(rows**2))


def learned_bits(name: str, dim: int) -> float:
    """Return the bits per value of a method that has learned a model, here of random rows."""
    layout = thermocline.KVLayout("float32", (thermocline.KVLayer(1, dim, dim),))
    keys, values = rows_of(dim)[:, None, :FIRST]
    samples = thermocline.Samples(layout, (None,), [[(keys, values)]])
    return thermocline.codec(name, profile=thermocline.learn(samples, name)).bits(layout)


def lloyd_max_error(num_bits: int) -> float:
    """Return the squared error of the best levels of a normal variable, by its density."""
    levels = np.asarray(thermocline.codebook(num_bits), np.float64)
    return quantised_error(levels)


def uniform_error(num_levels: int, reach: float) -> float:
    """Return the squared error of equal steps from ``-reach`` to ``reach``."""
    step = 2 * reach / num_levels
    return quantised_error(step * (np.arange(num_levels) - (num_levels - 1) / 2))


def quantised_error(levels: np.ndarray) -> float:
    """Return the mean squared error of a normal variable that is rounded to ``levels``."""
    x = np.linspace(-8, 8, 160_001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    middles = (levels[1:] + levels[:-1]) / 2
    nearest = levels[np.searchsorted(middles, x)]
    return float(np.sum((x - nearest) ** 2 * density) * (x[1] - x[0]))


def best_uniform_error(num_levels: int) -> float:
    """Return the squared error of equal steps whose size suits a normal variable best."""
    return min(uniform_error(num_levels, reach) for reach in np.linspace(1.5, 4, 251))


def bias(name: str, dim: int = 128, num_pairs: int = 2000) -> tuple[float, float]:
    """Return the slope of a regression of estimated on exact products, and its standard error.

    An unbiased estimate has slope 1. Each key is estimated under the method's one rotation, so many
    pairs of independent rows take the place of many rotations.
    """
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((1, num_pairs, dim), dtype=np.float32)
    query = rng.standard_normal((1, 8, dim), dtype=np.float32)
    method = plain(name)
    found = method.scores(query, method.pack(keys))[:, :, FIRST:].reshape(-1).astype(np.float64)
    exact = np.matmul(query, keys.swapaxes(1, 2))[:, :, FIRST:].reshape(-1).astype(np.float64)
    slope = float(found @ exact / (exact @ exact))
    rest = found - slope * exact
    return slope, float(np.sqrt(np.mean(rest**2) / (exact @ exact)))


def packed_per_second(name: str, dim: int) -> float:
    """Return how many rows one thread packs in a second."""
    method, rows = thermocline.codec(name), rows_of(dim)
    method.pack(rows)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        method.pack(rows)
        times.append(time.perf_counter() - begun)
    return float(rows.shape[0] * rows.shape[1] / min(times))


def within(value: float, claimed: float, share: float = 0.01) -> str:
    """Return the verdict on a value that should be within a share of the claimed one."""
    return HOLDS if abs(value - claimed) <= share * claimed else WRONG


def of_manthan_quant() -> list[Claim]:
    """Measure what ManthanQuant claims of its scheme, eight levels without a rotation."""
    name, project = "manthan", "ManthanQuant"
    even, uneven = cosine(name, 256), cosine(name, 256, uneven=True)
    rotated = cosine("tq3", 256, uneven=True)
    lloyd, uniform, wide = lloyd_max_error(3), best_uniform_error(8), uniform_error(8, 3.5)
    better = uniform / lloyd
    sizes = ", ".join(f"{ratio(name, dim)} at {dim}" for dim in (64, 128, 256))
    return [
        Claim(project, "rows are 5.12 times smaller", sizes, within(16 / bits(name, 256), 5.12)),
        Claim(
            project,
            "restored rows have a cosine of 0.983",
            f"{even:.3f} for even channels, {uneven:.3f} for uneven ones; {rotated:.3f} for those"
            " when they are rotated first (`tq3`)",
            IN_PART if within(even, 0.983, 0.002) == HOLDS else WRONG,
        ),
        Claim(
            project,
            "the error is 2.5 times smaller than that of equal steps",
            f"{better:.2f} times smaller than that of the best equal steps ({lloyd:.4f} and"
            f" {uniform:.4f}); {wide / lloyd:.1f} times if they reach to 3.5 deviations",
            within(better, 2.5, 0.1),
        ),
        Claim(
            project,
            "5.12 times smaller matches the theoretical bound",
            f"an error of {lloyd:.4f} at 3 bits; the bound is {4.0**-3:.4f}, and it has this error"
            f" at {math.log(lloyd, 0.25):.2f} bits",
            WRONG,
        ),
    ]


def of_turboquant_mlx() -> list[Claim]:
    """Measure what turboquant-mlx claims of eleven levels after a rotation."""
    name, project = "base11", "turboquant-mlx"
    found, information = bits(name, 128), math.log2(11)
    return [
        Claim(
            project,
            "11 levels take 3.5 bits a value",
            f"{information:.2f} bits of information; two codes in seven bits and the row's scale"
            f" take {found:.3f} at 128 (two codes in a byte would take 4)",
            IN_PART,
        ),
        Claim(
            project,
            "long contexts are 4.4 times smaller",
            ratio(name, 128),
            within(16 / found, 4.4),
        ),
        Claim(
            project,
            "short contexts are 13.8 times smaller",
            f"{16 / found:.2f}x at any length: 13.8 is against slots for 256 tokens of which 70 are"
            " in use",
            within(16 / found, 13.8),
        ),
    ]


def of_velox_quant() -> list[Claim]:
    """Measure ratios and products that VeloxQuant-MLX claims of the literature's methods."""
    project = "VeloxQuant-MLX"
    slope, error = bias("tqprod")
    levels, _ = bias("tq2")
    one_bit = bits("vecinfer:bits=1", 256)
    return [
        Claim(
            project,
            "VecInfer at one bit is 16 times smaller",
            f"{16 / one_bit:.1f}x at 256 with the row's scale, {ratio('vecinfer:bits=1', 128)} at"
            f" 128; cosine {cosine('vecinfer:bits=1', 128):.3f}",
            IN_PART,
        ),
        Claim(
            project,
            "QJL's signs make products unbiased",
            f"slope {slope:.3f} (standard error {error:.3f}) with them (`tqprod`), {levels:.3f} for"
            " two bits without (`tq2`)",
            HOLDS if abs(slope - 1) < 4 * error else WRONG,
        ),
    ]


def of_playground() -> list[Claim]:
    """Measure what turboQuantPlayground claims of keys of three bits and values of two."""
    project, dim = "turboQuantPlayground", 128
    even, uneven = cosine("tq3", dim), cosine("tq3", dim, uneven=True)
    speed = packed_per_second("tq3", dim) / 1e6
    return [
        Claim(
            project,
            "rotated keys of three bits keep their direction for channels of any sizes",
            f"cosine {even:.3f} for even channels, {uneven:.3f} for uneven ones",
            HOLDS if uneven > even - 0.003 else WRONG,
        ),
        Claim(
            project,
            "1.8 to 4.9 million rows of 128 packed in a second (PyTorch on a CPU, Metal on M4 Pro)",
            f"{speed:.1f} million by one thread of this processor",
            "another machine",
        ),
    ]


def of_papers() -> list[Claim]:
    """Measure what the papers claim whose methods the projects took over."""
    excess = [error(f"tq{n}", 128) * 4**n for n in range(1, 8)]
    slope, deviation = bias("rabitq")
    shrunk, _ = bias("rabitq:unbiased=0")
    polar, kivi = bits("polar", 128), bits("kivi", 128)
    commvq = learned_bits("commvq", 128)
    dense = learned_bits("commvq:dim=64,stages=1", 128)
    return [
        Claim(
            "TurboQuant",
            "the error is at most 2.72 times that of the bound, for any rows",
            f"{min(excess):.2f} to {max(excess):.2f} times for uneven rows, at 1 to 7 bits",
            HOLDS if max(excess) < 2.72 else WRONG,
        ),
        Claim(
            "PolarQuant",
            "3.875 bits a value",
            f"{polar:.3f}; the error is that of `tq3` with 3.125: {error('polar', 128):.4f} and"
            f" {error('tq3', 128):.4f}",
            within(polar, 3.875),
        ),
        Claim(
            "KIVI",
            "2 bits a value",
            f"{kivi:.2f} with the step and the smallest value of each group",
            within(kivi, 2),
        ),
        Claim(
            "CommVQ",
            "2 bits a value, 87.5 % less than 16",
            f"{commvq:.3f} bits with the row's scale, {1 - commvq / 16:.1%} less; up to"
            f" {16 / dense:.0f} times smaller with one vector for 64 values",
            IN_PART,
        ),
        Claim(
            "RaBitQ",
            "products with keys of one bit are unbiased",
            f"slope {slope:.3f} (standard error {deviation:.3f}); {shrunk:.3f} with the factor of"
            " the least error, which costs a model less (see `rabitq` in [Methods](methods.md))",
            HOLDS if abs(slope - 1) < 4 * deviation else WRONG,
        ),
    ]


CLAIMS: Final[tuple[Callable[[], list[Claim]], ...]] = (
    of_manthan_quant,
    of_turboquant_mlx,
    of_velox_quant,
    of_playground,
    of_papers,
)


def main(words: Sequence[str] | None = None) -> None:
    """Measure all claims, and print them as a table."""
    args = options_of(__doc__, "--write PATH").parse_args(words)
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    claims = [claim for measure in CLAIMS for claim in measure()]
    text = "\n".join(table(HEAD, [[*asdict(x).values()] for x in claims])).replace("---:", "---")
    write_json(args.json, [asdict(x) for x in claims])
    print(text)
    if args.write:
        replace_table(args.write, text)


if __name__ == "__main__":
    main()
