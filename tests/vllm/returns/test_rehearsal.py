"""The device's part in a real vLLM without a GPU: sessions sleep, return and survive a kill.

See ``tests.vllm.rig.rehearsal`` for the replacement of the GPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest

from engines.http import CACHE_HEADER
from engines.vllm_plugin.config import SETTINGS_FILE
from engines.vllm_plugin.process.command import transfer_config
from engines.wire import Demote
from kvstore.config import StoreConfig
from tests.vllm.rig.byte_tokenizer import write_tokenizer
from tests.vllm.rig.engine import BLOCK, RealEngine, Result, ref
from tests.vllm.rig.served import Served, session
from tests.vllm.rig.tiny_model import VOCAB, write_tiny_model
from tests.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

INTERPRETED: Final = {"TRITON_INTERPRET": "1"}
CONNECTOR: Final = {
    "kv_connector": "RehearsedConnector",
    "kv_connector_module_path": "tests.vllm.rig.rehearsal",
}
REHEARSED: Final = "rehearsed"  # how much was asked of the device
WORKER: Final = "tests.vllm.rig.rehearsal.RehearsedWorker"
NUM_BLOCKS: Final = 14  # the longest session has eight: no two of them stay
NAMES: Final = ("a", "b", "c")
NUM_TURNS, FIRST, LATER, ANSWER = 3, 150, 40, 8
KILLED_AFTER: Final = 5  # turns of all sessions


def words_of(name: str) -> list[list[int]]:
    """What the user says in each turn of a session."""
    chance = random.Random(name)
    lengths = [FIRST, *[LATER] * (NUM_TURNS - 1)]
    return [[chance.randrange(10, VOCAB) for _ in range(x)] for x in lengths]


class Rehearsed(Served):
    """The server, asked to go on with token ids."""

    def __init__(self, folder: Path, model: Path) -> None:
        connector = msgspec.json.decode(transfer_config(folder / SETTINGS_FILE)) | CONNECTOR
        args = (
            *("--kv-transfer-config", json.dumps(connector)),
            *("--worker-extension-cls", WORKER),
            *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
        )
        self.folder = folder
        longest = (NUM_BLOCKS - 1) * BLOCK
        super().__init__(folder, "raw", str(model), *args, max_context=longest, env=INTERPRETED)

    def answer(self, ids: list[int], name: str, tenant: str = "t") -> tuple[list[int], str]:
        """The next tokens, and where the prompt's KV came from. Without a name nothing is saved."""
        body = {
            "model": "smol",
            "prompt": ids,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        asking = self.post(body, session(name, tenant), "/v1/completions")
        status, headers, answer = self.run(asking)
        assert status == 200, answer
        return json.loads(answer)["choices"][0]["token_ids"], headers[CACHE_HEADER]

    def kill(self) -> None:
        """Kill every process of the engine, and wait for its next life."""
        assert self.server.pid is not None
        first = psutil.Process(self.server.pid)
        for process in [first, *first.children(recursive=True)]:
            process.kill()
        self.run(
            eventually(lambda: self.server.pid not in (None, first.pid) and not self.server.ready)
        )
        self.wait_ready()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Rehearsed]:
    model, folder = tmp_path / "model", tmp_path / "server"
    model.mkdir()
    folder.mkdir()
    write_tokenizer(write_tiny_model(model))
    served = Rehearsed(folder, model)
    yield served
    served.close()


def undisturbed(served: Rehearsed, name: str) -> list[list[int]]:
    """The answers of a session that stays in vLLM's own cache, turn after turn, and is not ours."""
    history: list[int] = []
    answers = []
    for words in words_of(name):
        tokens, _ = served.answer([*history, *words], "", f"plain {name}")
        history += [*words, *tokens]
        answers.append(tokens)
    return answers


@pytest.mark.thorough  # in CI the test after this one has the same turns without a server
def test_turns_through_eviction_sleep_and_a_kill_have_no_wrong_token(served):
    right = {name: undisturbed(served, name) for name in NAMES}
    histories: dict[str, list[int]] = {name: [] for name in NAMES}
    sources = []
    turns = [(turn, name) for turn in range(NUM_TURNS) for name in NAMES]
    for number, (turn, name) in enumerate(turns):
        prompt = histories[name] + words_of(name)[turn]
        tokens, source = served.answer(prompt, name)
        assert tokens == right[name][turn], f"turn {turn} of {name}, {source}"
        histories[name] = prompt + tokens
        sources.append(source.partition(";")[0])
        served.wait_saved(name)
        served.wait_all_saved()
        if number % 3 == 0:
            served.run(served.server.demote(session(name), "disk" if number % 2 else "ram"))
        if number == KILLED_AFTER:
            served.kill()
    later = sources[len(NAMES) :]
    assert sources[: len(NAMES)] == ["miss"] * len(NAMES)
    assert all(x.startswith("cold-") for x in later), sources
    after = sources[KILLED_AFTER + 1 :]
    assert after[: len(NAMES)] == ["cold-disk"] * len(NAMES), sources
    served.run(served.server.stop(1.0))
    assert int((served.folder / REHEARSED).read_text()) > len(after), "the host did the work"


def engine_in(folder: Path, store: StoreConfig, connector: dict[str, str] | None, **options: Any):
    """An engine of this process, in whose pool the rehearsed device may be."""
    model, runtime = folder / "model", folder / "vllm"
    model.mkdir(parents=True)
    runtime.mkdir()
    return RealEngine(
        str(write_tiny_model(model)),
        runtime,
        store,
        connector=connector,
        skip_tokenizer_init=True,
        worker_extension_cls=WORKER,
        **options,
    )


def test_turns_through_eviction_and_sleep_have_no_wrong_token(tmp_path, monkeypatch):
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
    pool = {"num_gpu_blocks_override": NUM_BLOCKS, "max_model_len": (NUM_BLOCKS - 1) * BLOCK}
    store = StoreConfig(codec="raw", ram_bytes=1 << 28)
    engine = engine_in(tmp_path, store, CONNECTOR, **pool)
    turns = [(turn, name) for turn in range(NUM_TURNS) for name in NAMES]

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
    engine.close()
    assert int((tmp_path / "vllm" / REHEARSED).read_text()) > len(later), "the host did the work"


def lossy_turns(folder: Path, connector: dict[str, str] | None) -> list[Result]:
    """A session packed with loss, three times asleep; returned by the connector that is given."""
    store = StoreConfig(codec="tq3", accept_loss=True, ram_bytes=1 << 28)
    engine = engine_in(folder, store, connector, dtype="bfloat16")
    history: list[int] = []
    found = []
    for words in words_of("lossy"):
        found.append(engine.ask([*history, *words], "lossy", tokens=ANSWER))
        history += [*words, *found[-1].tokens]
        engine.wait_saved("lossy")
        assert engine.forget_local()
    engine.close()
    if connector:
        done = int((folder / "vllm" / REHEARSED).read_text())
        assert done > len(found), "the host did the work"
    return found


@pytest.mark.thorough
def test_what_is_packed_with_loss_returns_as_from_the_hosts_codec(tmp_path, monkeypatch):
    """To the last bit of every probability: the codec decides what is lost, not who packs."""
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
    device = lossy_turns(tmp_path / "device", CONNECTOR)
    host = lossy_turns(tmp_path / "host", None)
    assert [x.restored for x in device] == [x.restored for x in host]
    assert all(x.restored > FIRST // BLOCK * BLOCK - 1 for x in device[1:])
    assert [x.tokens for x in device] == [x.tokens for x in host]
    assert [x.logprobs for x in device] == [x.logprobs for x in host]
