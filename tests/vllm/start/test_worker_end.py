"""A worker's parts are closed in the order in which they need each other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engines.vllm_plugin.messages import RankSaved
from engines.vllm_plugin.plan import Save, StepWork
from engines.vllm_plugin.worker.worker_side import WorkerSide
from tests.block_sessions import ref
from tests.unit.engines.vllm_plugin.hub_engine import Unmeasured
from tests.unit.engines.vllm_plugin.worker.rank_rig import CHAIN, IDS
from tests.unit.engines.vllm_plugin.worker.test_rank import LinkedRank
from tests.waiting import until

pytestmark = pytest.mark.vllm


def test_a_save_under_way_is_reported_and_reaches_the_disk(tmp_path: Path) -> None:
    rank = LinkedRank(tmp_path)
    worker = WorkerSide(rank.transfer, rank.link, rank.store, Unmeasured())
    worker.start_saves(StepWork(saves=[Save(1, ref(), CHAIN, IDS)]))
    assert rank.reading.wait(10)
    closing = threading.Thread(target=worker.close)
    closing.start()
    closing.join(0.2)  # time enough to end what must not end yet
    rank.go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    until(lambda: rank.news == [RankSaved(1, ref(), kept=True)])
    rank.close()  # what is left of it; all else may be closed twice
    again = LinkedRank(tmp_path)
    assert again.staged(1, CHAIN).tier == "disk"
    again.close()
