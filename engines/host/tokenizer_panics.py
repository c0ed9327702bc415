"""Turns panics of the tokenizers library into errors that a request can be refused with.

The library panics at some texts ("AddedVocabulary bad split"), where added tokens overlap and take
the blanks beside them. Its ``PanicException`` is no ``Exception``, so what keeps a thread or a task
alive lets it pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_PANIC: Final = "PanicException"  # of pyo3; each library has a class of its own


class UnreadableText(ValueError):
    """A text that the model's tokenizer cannot take."""

    def __init__(self) -> None:
        super().__init__("the model's tokenizer cannot read this text: leave out odd characters")


@contextmanager
def panics_refused() -> Iterator[None]:
    """Raise ``UnreadableText`` in the place of a panic."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise UnreadableText from error
