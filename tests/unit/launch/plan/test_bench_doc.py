"""The sentences of docs/bench.md are those that ``plan`` says today."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_sentences import markdown

DOC = Path(__file__).parents[4] / "docs" / "bench.md"


@pytest.mark.slow
def test_the_sentences_are_todays():
    assert "\n".join(markdown()) in DOC.read_text("utf-8")
