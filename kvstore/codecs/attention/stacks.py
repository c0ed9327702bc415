"""Products with rows of a stack, and weighted sums, through the stages of its pipeline.

See ``sources``. Rows that a pipeline stores unquantised have a gain of zero here, so they count as
zero, except for a mean that a stage before the gain adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvstore.codecs.attention.planes import PlaneQuantiser
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.sources import (
    AttendedTransform,
    Components,
    Scaled,
    Source,
)
from kvstore.codecs.stacks.stage_protocols import Quantiser
from kvstore.codecs.stages.planes import BitPlanes


class KeptRow(NamedTuple):
    """A row that is stored unquantised."""

    unit: int
    token: int
    bits: np.ndarray  # uint16 (width,), the bits of the values


class AttendedStack(NamedTuple):
    """The rows of a stack: the packed ones, and those stored unquantised."""

    source: Source
    kept: Sequence[KeptRow]


@runtime_checkable
class AttendedCoder(Protocol):
    """A coder whose codes need not be unpacked."""

    def attended(self, reader: Reader, num_tokens: int, quantiser: Quantiser) -> Source:
        """Returns the components of all codes as a source."""


def can_attend(pipeline: object) -> bool:
    """Returns whether all stages of a stack can work on queries and sums instead of rows."""
    if not isinstance(pipeline, Pipeline) or len(pipeline.shape.gain_groups) != 1:
        return False
    stages = (*pipeline.before, *pipeline.after)
    return all(isinstance(stage, AttendedTransform) for stage in stages)


def attended_stack(pipeline: Pipeline, reader: Reader, num_tokens: int) -> AttendedStack:
    """Reads a stack's part of a payload; ``can_attend`` of the pipeline must be true.

    Raises:
        Corrupt: this pipeline did not write the payload.
    """
    numbers, exact = pipeline.read_kept(reader, num_tokens)
    parts = pipeline.read_parts(reader, num_tokens)
    units, tokens = np.divmod(numbers, max(num_tokens, 1))
    each = zip(units.tolist(), tokens.tolist(), exact, strict=True)
    kept = [KeptRow(*row) for row in each]
    source = _components(pipeline, reader, num_tokens)
    source = _through(source, pipeline.after, parts.after)
    gains = parts.gains[:, :, 0].copy()
    gains[units, tokens] = 0
    return AttendedStack(_through(Scaled(source, gains), pipeline.before, parts.before), kept)


def _components(pipeline: Pipeline, reader: Reader, num_tokens: int) -> Source:
    coder, quantiser = pipeline.coder, pipeline.quantiser
    if isinstance(coder, AttendedCoder):
        return coder.attended(reader, num_tokens, quantiser)
    if not (isinstance(coder, BitPlanes) and coder.are_units_alike):
        return Components(quantiser.restore(coder.read(reader, num_tokens)))
    planes = coder.take(reader, num_tokens)
    if isinstance(quantiser, PlaneQuantiser):
        return quantiser.attended(planes)
    return Components(quantiser.restore(planes.codes(slice(None))))


def _through(source: Source, stages: Sequence[object], notes: Sequence[object]) -> Source:
    for stage, note in zip(stages[::-1], notes[::-1], strict=True):
        assert isinstance(stage, AttendedTransform)
        source = stage.attended(source, note)
    return source
