"""CommVQ: additive vector quantisation, groups of neighbours as sums of learned vectors.

Idea: the first stage takes its nearest vector, the next stage the vector nearest to the rest.
Formula: x[8 i : 8 i + 8] = v1[c1] + v2[c2], with 256 vectors in each stage. CommVQ trains all
stages together and makes them commute with RoPE, so that attention can work on codes. A cold store
restores whole keys, so un-RoPE before and RoPE after work as well, and stages are learned one by
one.
Size: ``stages`` bytes for ``dim`` neighbours, usually 2 + 16 / D bits; a quarter of a bit, 64 times
smaller than bf16, with one stage for 64 neighbours of 128.
Paper: CommVQ, arXiv 2506.18879.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.learning.samples import Samples, unit_rows
from kvstore.codecs.literature.stages.vectors import (
    NUM_VECTORS,
    UNIT,
    first_of,
    k_means,
    nearest,
    nearest_of_each,
)
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.gain import HalfGain, root_mean_squares
from kvstore.codecs.stages.model_transforms import ModelMean, UnRope
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout

HEAD = Scope("head")


@dataclass(frozen=True)
class CommVQ:
    """Learns ``stages`` codebooks for every ``dim`` neighbours of every head."""

    dim: int = 8
    stages: int = 2
    rounds: int = 8
    most_tokens: int = 2048

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        learned = {}
        for number, shape in enumerate(stack_shapes(HEAD, samples.layout)):
            if shape.width % self.dim:
                raise UnknownCodec(f"commvq: {shape.width} values are no groups of {self.dim}")
            sizes = functools.partial(root_mean_squares, shape=shape)
            texts = [stack for stack, _ in unit_rows(samples, shape, means, sizes)]
            rows = np.concatenate(texts, axis=1)
            rows = rows[:, :: -(-rows.shape[1] // self.most_tokens)]
            vectors = [learn_vectors(x, self.dim, self.stages, self.rounds) for x in rows]
            learned[f"vectors.{number}"] = np.stack(vectors).astype(np.float16)
        return learned

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        pipelines = []
        for number, shape in enumerate(stack_shapes(HEAD, layout)):
            vectors = learned[f"vectors.{number}"]
            units, groups, stages = vectors.shape[:3]
            pipelines.append(
                Pipeline(
                    shape,
                    (UnRope(shape, profile.ropes), ModelMean(shape, learned["means"])),
                    HalfGain(shape),
                    (),
                    AdditiveVectors(vectors),
                    BitPlanes(np.full((units, groups * stages), 8)),
                )
            )
        return tuple(pipelines)


COMMVQ = CommVQ()


class AdditiveVectors:
    """Takes one byte as the code for each stage of each group of neighbours.

    Implements ``Quantiser``.
    """

    def __init__(self, vectors: np.ndarray) -> None:
        """``vectors``: floats (units, groups, stages, 256, dim); rows have groups * dim columns."""
        self._vectors = vectors.astype(np.float32)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        units, groups, stages, _, dim = self._vectors.shape
        num_tokens = components.shape[1]
        rows = components.reshape(units, num_tokens, groups, dim).swapaxes(1, 2)
        left = rows.reshape(units * groups, num_tokens, dim).copy()
        codes = np.empty((units, num_tokens, groups, stages), np.uint8)
        for stage in range(stages):
            vectors = self._vectors[:, :, stage].reshape(units * groups, NUM_VECTORS, dim)
            found = nearest_of_each(left, vectors)
            left -= np.take_along_axis(vectors, found[:, :, None], axis=1)
            codes[..., stage] = found.reshape(units, groups, num_tokens).swapaxes(1, 2)
        return codes.reshape(units, num_tokens, groups * stages)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        units, groups, stages, _, dim = self._vectors.shape
        num_tokens = codes.shape[1]
        numbers = codes.reshape(units, num_tokens, groups, stages)
        tables = self._vectors.reshape(-1, dim)
        firsts = np.arange(units * groups * stages).reshape(units, 1, groups, stages) * NUM_VECTORS
        places = firsts + numbers
        rows = tables[places[..., 0]]
        for stage in range(1, stages):
            rows += tables[places[..., stage]]
        return rows.reshape(units, num_tokens, groups * dim)


def learn_vectors(rows: np.ndarray, dim: int, num_stages: int, rounds: int) -> np.ndarray:
    """Learn the codebooks of one unit, fp32 (groups, stages, 256, dim).

    ``rows``: fp32 (tokens, width).
    """
    left = rows.reshape(len(rows), -1, dim) / UNIT
    stages = np.empty((left.shape[1], num_stages, NUM_VECTORS, dim))
    for group, stage in np.ndindex(*stages.shape[:2]):
        samples = np.rint(left[:, group])
        vectors = k_means(samples, first_of(samples, NUM_VECTORS), rounds)
        left[:, group] -= vectors[nearest(samples, vectors)]
        stages[group, stage] = vectors
    return (stages * UNIT).astype(np.float32)
