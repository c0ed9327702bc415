"""From a spectrum to twenty times smaller: the bits that a model's KV needs at a given error.

    pip install '.[mlx]'
    python -m docs.tutorials.spectrum [--plot spectrum.png]

A rotation chosen at random treats all directions alike. KV does not: some directions of a head, and
many more of a whole layer, hardly vary. The eigenvectors of the covariance (the Karhunen-Loeve
transform) separate them, and reverse water-filling gives the number of bits: a direction of
variance v takes log2(v / t) / 2 bits, or none if v is below the level t, which is the same for all
(Cover and Thomas, Elements of Information Theory, chapter 10).

The transform is learned from some texts and the variances are measured on another one, since a
server packs other texts than those from which it learned. Keys are rotated back first (RoPE spreads
one direction over many), and each head has the weight 1. The wider the scope, the fewer the bits:
one head, all heads of a layer with keys and values together, ten layers. ``dense3``, ``balanced``
and ``max`` are codecs with these scopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.families.fast_blas import begin_with_blas
from docs.tutorials.live_cache import sample_folder
from docs.tutorials.picture import draw, path_of_picture
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes

ERROR = 0.035  # squared, relative: the error of three bits without a transform
NUM_TEXTS, NUM_TOKENS = 9, 768  # the last text is held out
SCOPES = (Scope("head"), Scope("layer"), Scope("group", 10))


@dataclass(frozen=True)
class Spread:
    """The variances of a held-out text along learned directions.

    ``variances`` has a descending array for each unit of the scope.
    """

    scope: Scope
    variances: list[np.ndarray]

    def bits(self, error: float) -> float:
        """Return the bits for each value that reverse water-filling needs at a relative error."""
        values = np.concatenate(self.variances)
        low, high = 0.0, float(values.max())
        for _ in range(60):
            level = (low + high) / 2
            if np.minimum(values, level).sum() > error * values.sum():
                high = level
            else:
                low = level
        return float(np.mean(np.log2(np.maximum(values / high, 1)) / 2))


def spread(samples: Samples, held_out: Samples, scope: Scope) -> Spread:
    """Return the variances of ``held_out`` along directions that were learned from ``samples``."""
    found = []
    for shape in stack_shapes(scope, samples.layout):
        rows = np.concatenate(list(samples.stacks(shape)), axis=1)
        others = np.concatenate(list(held_out.stacks(shape)), axis=1)
        for number, unit in enumerate(shape.units):
            mean = rows[number].mean(axis=0)
            weights = _weights(rows[number] - mean, [x.dim for x in unit])
            learned, tested = ((x[number] - mean) * weights for x in (rows, others))
            _, directions = np.linalg.eigh(learned.T @ learned)
            found.append(np.sort(np.mean((tested @ directions) ** 2, axis=0))[::-1])
    return Spread(scope, found)


def _weights(rows: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Return a factor for each column, with which each head has the mean variance 1."""
    heads = np.split(rows, np.cumsum(dims)[:-1], axis=1)
    sizes = [np.full(x.shape[1], np.sqrt(np.mean(x**2))) for x in heads]
    return np.asarray(1 / np.concatenate(sizes))


def captured(
    model: Any, tokenizer: Any, num_texts: int, num_tokens: int
) -> tuple[Samples, Samples]:
    """Return samples of the KV of some texts, and separately that of the last text."""
    import thermocline.mlx
    from engines.calibration.corpus import fit_texts

    tokens = (tokenizer.encode(x.content[: 8 * num_tokens])[:num_tokens] for x in fit_texts())
    long_enough = [x for x in tokens if len(x) == num_tokens][:num_texts]
    instrument = thermocline.mlx.instrument(model)
    runs = [instrument.prefill(x).run for x in long_enough]
    learned, held_out = runs[:-1], runs[-1:]
    return (
        Samples(instrument.layout, instrument.ropes, learned),
        Samples(instrument.layout, instrument.ropes, held_out),
    )


def measured(
    model: Any,
    tokenizer: Any,
    scopes: Sequence[Scope] = SCOPES,
    num_texts: int = NUM_TEXTS,
    num_tokens: int = NUM_TOKENS,
) -> list[Spread]:
    samples, held_out = captured(model, tokenizer, num_texts, num_tokens)
    return [spread(samples, held_out, scope) for scope in scopes]


def main(arguments: Sequence[str] | None = None) -> None:
    picture = path_of_picture(__doc__, arguments)
    import mlx.core as mx
    import mlx_lm

    model, tokenizer, *_ = mlx_lm.load(str(sample_folder()))
    model.set_dtype(mx.float32)  # as the server does on a CPU
    rows = measured(model, tokenizer)
    print(f"bits for each value at a relative error of {ERROR}:")
    print(f"  all directions alike: {-np.log2(ERROR) / 2:.2f}")
    for row in rows:
        bits = row.bits(ERROR)
        print(f"  learned for {row.scope}: {bits:.2f}, {16 / bits:.0f} times smaller than bf16")
    if picture is not None:
        draw(picture, lambda axes: _spectra(axes, rows), lambda axes: _rates(axes, rows))


def _spectra(axes, rows: Sequence[Spread]) -> None:
    for row in rows:
        mean = np.mean(row.variances, axis=0)
        axes.semilogy(np.linspace(0, 1, len(mean)), mean, label=f"{row.scope}: {len(mean)} values")
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(
        title="Variance along learned directions, held-out text",
        xlabel="share of the directions",
        ylabel="variance; 1 = mean",
    )
    axes.legend()


def _rates(axes, rows: Sequence[Spread]) -> None:
    errors = np.geomspace(0.003, 0.3, 25)
    axes.semilogx(errors, -np.log2(errors) / 2, "k--", label="all directions alike")
    for row in rows:
        axes.semilogx(errors, [row.bits(x) for x in errors], label=str(row.scope))
    axes.set(title="Bits by reverse water-filling", xlabel="relative error", ylabel="bits")
    axes.legend()


if __name__ == "__main__":
    begin_with_blas("docs.tutorials.spectrum")
    main()
