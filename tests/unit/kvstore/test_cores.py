from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cores import memory_nodes, usable_cores


@pytest.mark.parametrize(("allowed", "number"), [("0", 1), ("1", 1), ("0-1", 2), ("0,2-4,9", 5)])
def test_memory_nodes_are_those_that_are_allowed(tmp_path: Path, allowed: str, number: int) -> None:
    status = tmp_path / "status"
    status.write_text(
        f"Name:\tx\nMems_allowed:\t00000001\nMems_allowed_list:\t{allowed}\nEnd:\t1\n"
    )
    assert memory_nodes(status) == number
    status.write_text("Name:\tx\n")
    assert memory_nodes(status) == 1
    assert memory_nodes(tmp_path / "not-there") == 1


@pytest.mark.parametrize(("text", "most"), [("100000 100000", 1), ("max 100000", None)])
def test_a_containers_quota_counts(tmp_path: Path, text: str, most: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    without = usable_cores(tmp_path / "not-there")
    assert usable_cores(quota) == (min(most, without) if most else without)
