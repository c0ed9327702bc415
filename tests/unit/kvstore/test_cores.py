from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cores import memory_nodes, usable_cores


@pytest.mark.parametrize(
    ("names", "number"),
    [((), 1), (("node0",), 1), (("node0", "node1", "node10", "online", "nodes"), 3)],
)
def test_memory_nodes_are_counted(tmp_path: Path, names: tuple[str, ...], number: int) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    assert memory_nodes(tmp_path) == number
    assert memory_nodes(tmp_path / "not-there") == 1


@pytest.mark.parametrize(("text", "most"), [("100000 100000", 1), ("max 100000", None)])
def test_a_containers_quota_counts(tmp_path: Path, text: str, most: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    without = usable_cores(tmp_path / "not-there")
    assert usable_cores(quota) == (min(most, without) if most else without)
