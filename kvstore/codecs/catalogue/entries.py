"""The types of the table's rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

# A function that makes a codec from numbers, passed by name; or an import string of the function.
MakeCodec: TypeAlias = str | Callable[..., Any]


class Parameter(NamedTuple):
    """A number that a codec's name may set, as in ``kivi:bits=4``."""

    name: str
    usual: float
    least: float = -math.inf
    most: float = math.inf
    is_whole: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.span}, usually {self.usual:g})"

    @property
    def span(self) -> str:
        """The range of accepted values, in words."""
        if not math.isinf(self.least) and not math.isinf(self.most):
            return f"{self.least:g} to {self.most:g}"
        return "any whole number" if self.is_whole else "any number"


class CodecEntry(NamedTuple):
    """One row of the table.

    ``bits``: per value, for heads of 128 values and chunks of 128 tokens; headers and the exact
    first tokens of a session are not counted. For a learned codec, the usual rate of models; NaN
    if it is not known.
    """

    bits: float
    sentence: str
    make: MakeCodec = ""  # makes the codec; "" = only a profile can make it
    learn: object = ""  # its ``CalibratedPreset``, or an import string; "" = nothing is learned
    exact: bool = False  # True: values are restored bit for bit
    small_chunks: bool = False  # True: chunks of few tokens take no more bytes per token
    parameters: tuple[Parameter, ...] = ()
    paper: str = ""  # the paper or project, and where to find it
