"""The parts of the benchmark of products with packed keys; a smallest run is among integrations."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.attention_scores import HEADS, Point, by_blocks, draw, rows_of


def test_points_become_a_table_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    points = [
        Point(64, tokens, queries, way, 9.0, ratio)
        for queries in (1, 2)
        for tokens in (128, 256)
        for way, ratio in (("fp32", 1.0), ("tq3", 0.5), ("tq3, restore", queries + 1.0))
    ]
    head, rows = rows_of(points)
    assert head == ["dim", "queries", "tokens", "tq3", "tq3, restore"]
    assert rows[0] == ["64", "1", "128", "0.50", "2.00"]
    assert rows[-1] == ["64", "2", "256", "0.50", "3.00"]
    draw(points, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_bf16_keys_are_widened_whatever_the_blocks_are():
    keys = np.full((HEADS, 300, 8), 0x3F80, np.uint16)  # ones
    query = np.ones((HEADS, 2, 8), np.float32)
    assert (by_blocks(query, keys) == 8).all()
