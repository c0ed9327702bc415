"""The form of the table's rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

# Makes a codec of numbers by name: itself, or an import string of it.
MakeCodec: TypeAlias = str | Callable[..., Any]


class Parameter(NamedTuple):
    """A number that a codec's name may give, as in ``kivi:bits=4``."""

    name: str
    usual: float
    least: float = -math.inf
    most: float = math.inf
    is_whole: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.span}, usually {self.usual:g})"

    @property
    def span(self) -> str:
        """The values that are taken, in words."""
        if not math.isinf(self.least) and not math.isinf(self.most):
            return f"{self.least:g} to {self.most:g}"
        return "any whole number" if self.is_whole else "any number"


class CodecEntry(NamedTuple):
    """One row of the table.

    ``bits``: per value, for heads of 128 values and chunks of 128 tokens; headers and the exact
    first tokens of a session are not counted. Of a learned codec, about what models take; not a
    number where that is not known.
    """

    bits: float
    sentence: str
    make: MakeCodec = ""  # makes the codec; "" = only a profile can
    learn: object = ""  # its ``CalibratedPreset``, or an import string; "" = nothing to learn
    exact: bool = False  # nothing is lost
    small_chunks: bool = False  # chunks of few tokens take no more bytes per token
    parameters: tuple[Parameter, ...] = ()
    paper: str = ""  # or project, and where to find it
