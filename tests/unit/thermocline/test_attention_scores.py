"""The benchmark of products with packed keys: its smallest run."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import attention_scores
from benchmarks.attention_scores import draw, measure, rows_of


def test_every_way_is_timed_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    points = [x for queries in (1, 2) for x in measure(["tq3"], 64, 128, queries)]
    head, rows = rows_of(points)
    assert head == ["dim", "queries", "tokens", "bf16", "tq3", "tq3, restore"]
    assert [row[:3] for row in rows] == [["64", "1", "128"], ["64", "2", "128"]]
    fp32 = {x.queries: x.ns_per_key for x in points if x.way == "fp32"}
    assert all(x.x_fp32 == pytest.approx(x.ns_per_key / fp32[x.queries]) for x in points)
    draw(points, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_bf16_keys_are_widened_whatever_the_blocks_are():
    keys = np.full((attention_scores.HEADS, 300, 8), 0x3F80, np.uint16)  # ones
    query = np.ones((attention_scores.HEADS, 2, 8), np.float32)
    assert (attention_scores._by_blocks(query, keys) == 8).all()
