"""Docstrings and comments use the field's words: a private dialect stays as rare as elsewhere.

Counted per 1,000 words of the product. The bound of each is twice the share in LMCache's docstrings
and comments (``docs/decisions/0082-plain-words.md``).
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "engines", "kvstore", "scheduler", "launch", "thermocline")
BOUNDS = {
    r"behind": 0.26,  # for "after"
    r"nobody|somebody|someone|anybody": 0.04,
    r"(?:of|for|by|to|with|from|and|says|is|in) what": 0.10,  # as a noun
    r"tell|tells|told|telling": 0.12,
    r"whoever|whatever|whichever": 0.22,
}


def prose_of(source: str) -> Iterator[str]:
    """The comments and the strings in three quotes."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_doc = token.type == tokenize.STRING and token.string.lstrip("rbfu").startswith('"""')
        if token.type == tokenize.COMMENT or is_doc:
            yield token.string


@cache
def prose() -> str:
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return "\n".join("\n".join(prose_of(path.read_text())) for path in files)


@pytest.mark.parametrize("words", BOUNDS)
def test_words_of_a_dialect_are_rare(words):
    found = re.findall(rf"\b(?:{words})\b", prose(), re.IGNORECASE)
    share = 1000 * len(found) / len(prose().split())
    assert share <= BOUNDS[words], f"{len(found)} times {words}: name the thing or the actor"
