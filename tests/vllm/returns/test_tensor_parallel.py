"""Two ranks on a real vLLM: each keeps its own heads, and only what both have is offered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import StoreConfig
from tests.vllm.rig.engine import BLOCK, RealEngine, opened
from tests.vllm.rig.faulty_codec import Faults
from tests.vllm.rig.tiny_model import write_tiny_model
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]
WHOLE = 599 // BLOCK * BLOCK


@pytest.fixture(scope="module")
def two_ranks(faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    codec = "tests.vllm.rig.faulty_codec:OneRankFaulty"
    store = StoreConfig(codec=codec, ram_bytes=1 << 28, disk_bytes=1 << 28)
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be one core for both
        with opened(folder, write_tiny_model, store, tensor_parallel_size=2) as engine:
            yield engine


@pytest.fixture
def engine(two_ranks: RealEngine, faults: Faults) -> Iterator[RealEngine]:
    assert two_ranks.forget_local()
    yield two_ranks
    faults.clear()
    assert two_ranks.forget_local(), "blocks are held after the test"


def leave(engine: RealEngine) -> None:
    """Every rank has ended its saves, well or badly, and vLLM's own cache is empty."""
    assert engine.forget_local(), "a rank did not give the blocks back"
    until(lambda: not engine.report().save_queue_bytes, what="a save did not end")


def test_every_rank_keeps_its_own_heads(engine, sessions):
    fresh = engine.ask(sessions[0], "both")
    own = engine.ask(sessions[0], "both")
    report = engine.wait_saved("both")
    assert report.cold_bytes >= report.hot_bytes  # raw: both halves of the heads, with headers
    folders = sorted(Path(engine.settings.disk_path).glob("vllm-rank-*"))
    assert [x.name for x in folders] == ["vllm-rank-0", "vllm-rank-1"]
    leave(engine)
    back = engine.ask(sessions[0], "both")
    assert (back.restored, back.tokens) == (WHOLE, fresh.tokens)
    pairs = zip(back.logprobs, own.logprobs, strict=True)
    assert max(abs(a - b) for a, b in pairs) == 0.0


def test_only_what_every_rank_has_saved_is_offered(engine, faults, sessions):
    """One rank loses the save; the other has it all, and vLLM must not hear of it."""
    faults.break_decoding(0)
    right = engine.ask(sessions[1], "half").tokens
    leave(engine)
    assert engine.counters()["saves_failed"] == 1
    assert "half" not in engine.sessions()
    faults.clear()
    back = engine.ask(sessions[1], "half")
    assert (back.restored, back.tokens, back.finish) == (0, right, "length")
    leave(engine)
    healed = engine.ask(sessions[1], "half")
    assert (healed.restored, healed.tokens) == (WHOLE, right)


@pytest.mark.parametrize("first_token", [0, 256], ids=["first block", "middle block"])
def test_what_one_rank_cannot_load_is_computed_again_on_all(engine, faults, sessions, first_token):
    """The other rank has filled its blocks already: they are thrown away with the first's."""
    name = f"broken{first_token}"
    right = engine.ask(sessions[2], name).tokens
    leave(engine)
    faults.fail(first_token)
    back = engine.ask(sessions[2], name)
    assert (back.tokens, back.finish, back.reason) == (right, "length", "corrupt")
    faults.clear()
    leave(engine)
    healed = engine.ask(sessions[2], name)
    assert (healed.tokens, healed.restored) == (right, WHOLE)
