"""Finds the marks by which a model fills in text between two others, if it learned any."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from engines.wire import FillIn

# Before the text in front, between it and the text after, and where the model goes on. Of Qwen and
# CodeGemma; StarCoder and Granite; SantaCoder; DeepSeek, whose second one marks the hole.
_KNOWN: Final = (
    FillIn("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    FillIn("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    FillIn("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FillIn("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def fill_in_of(vocabulary: Container[str]) -> FillIn | None:
    """Return the marks that a model's vocabulary has, each as one token; None if it has none."""
    for marks in _KNOWN:
        if all(mark in vocabulary for mark in (marks.before, marks.between, marks.after)):
            return marks
    return None
