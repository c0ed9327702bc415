"""The device's part in a real vLLM without a GPU: sessions sleep and return.

See ``tests.vllm.rig.rehearsal`` for the replacement of the GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from engines.wire import Demote
from kvstore.config import StoreConfig
from tests.vllm.rig.engine import BLOCK, RealEngine, Result, opened, ref
from tests.vllm.rig.tiny_model import VOCAB, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

CONNECTOR: Final = {
    "kv_connector": "RehearsedConnector",
    "kv_connector_module_path": "tests.vllm.rig.rehearsal",
}
WORKER: Final = "tests.vllm.rig.rehearsal.RehearsedWorker"
NUM_BLOCKS: Final = 14  # the longest session has eight: no two of them stay
NAMES: Final = ("a", "b", "c")
LENGTHS: Final = (150, 40, 40)  # of a session's turns
ANSWER: Final = 8


def words_of(name: str) -> list[list[int]]:
    """What the user says in each turn of a session."""
    chance = random.Random(name)
    return [[chance.randrange(10, VOCAB) for _ in range(x)] for x in LENGTHS]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealEngine]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    store = StoreConfig(codec="raw", ram_bytes=1 << 28)
    pool = {"num_gpu_blocks_override": NUM_BLOCKS, "max_model_len": (NUM_BLOCKS - 1) * BLOCK}
    device: dict[str, Any] = {"connector": CONNECTOR, "worker_extension_cls": WORKER}
    with opened(tmp_path, write_tiny_model, store, **pool, **device) as engine:
        yield engine


def test_turns_through_eviction_and_sleep_have_no_wrong_token(engine):
    turns = [(turn, name) for turn in range(len(LENGTHS)) for name in NAMES]

    def play(salt: str, saved: bool) -> list[Result]:
        histories: dict[str, list[int]] = {name: [] for name in NAMES}
        found = []
        for number, (turn, name) in enumerate(turns):
            prompt = histories[name] + words_of(name)[turn]
            found.append(engine.ask(prompt, name if saved else "", tokens=ANSWER, salt=salt))
            histories[name] = prompt + found[-1].tokens
            if saved:
                engine.wait_saved(name)
                if number % 3 == 0:
                    engine.control(Demote(ref(name), "ram"))
        return found

    right, back = play("plain", saved=False), play("asleep", saved=True)
    assert [x.tokens for x in back] == [x.tokens for x in right]
    first, later = back[: len(NAMES)], back[len(NAMES) :]
    assert [x.restored for x in first] == [0] * len(NAMES)
    assert all(x.restored > 0 for x in later), [(x.cached, x.restored) for x in later]
    done = Path(engine.settings.runtime_dir, "rehearsed").read_text()
    assert int(done) > len(later), "the host did the work"
