"""A router that reads vLLM's KV events knows of every session that sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.wire import SessionRef
from tests.vllm.conftest import model_path
from tests.vllm.rig.event_reader import EventReader
from tests.vllm.rig.served import Served, session

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]
HISTORY = "The quick brown fox jumps over the lazy dog and runs far away. " * 40


def body_of(name: str) -> dict[str, object]:
    return {
        "model": "smol",
        "messages": [{"role": "user", "content": f"This is {name}. {HISTORY}"}],
        "max_tokens": 8,
        "temperature": 0,
    }


@pytest.fixture(scope="module")
def reader() -> Iterator[EventReader]:
    reader = EventReader()
    yield reader
    reader.close()


def serve(folder: Path, reader: EventReader) -> Served:
    return Served(folder, "raw", model_path(), "--kv-events-config", reader.config())


def ask(served: Served, who: SessionRef) -> None:
    status, _, answer = served.run(served.post(body_of(who.id), who))
    assert status == 200, answer


def test_a_router_finds_what_sleeps_and_nothing_that_was_deleted(tmp_path, reader, pytestconfig):
    served = serve(tmp_path, reader)
    try:
        ask(served, session("sleeper"))
        reader.until(lambda: reader.held("CPU") and reader.held("CPU") == reader.held("STORAGE"))
        blocks = reader.held("GPU")
        assert len(blocks) > 10, [(x["type"], x["medium"]) for x in reader.events]
        assert reader.held("CPU") == blocks  # of an engine that has nothing to do

        # A reader finds every block at every moment, in the order in which events come.
        served.run(served.server.demote(session("sleeper"), "disk"))
        reader.until(lambda: not reader.held("GPU") and not reader.held("CPU"))
        assert reader.held("STORAGE") == blocks
        first_gone = next(i for i, x in enumerate(reader.events) if x["type"] == "BlockRemoved")
        stored = [x for x in reader.events[:first_gone] if x["type"] == "BlockStored"]
        for medium in ("GPU", "CPU", "STORAGE"):
            reported = {h for x in stored if x["medium"] == medium for h in x["block_hashes"]}
            assert reported == blocks, medium

        ask(served, session("other", "u"))
        reader.until(lambda: len(reader.held("STORAGE")) > len(blocks))
        reader.until(lambda: reader.held("CPU") and reader.held("CPU") < reader.held("STORAGE"))
        assert served.run(served.server.forget(session("other", "u"))) is not None
        reader.until(lambda: reader.held("STORAGE") == blocks)
        reader.until(lambda: not reader.held("CPU") and not reader.held("GPU"))
        ours = [x for x in reader.events if x.get("medium") != "GPU"]
        salts = {session("sleeper").salt.hex(), session("other", "u").salt.hex()}
        assert not [x for x in ours if any(salt in repr(x) for salt in salts)]
        vllms = [x for x in reader.events if x.get("medium") == "GPU"]
        assert [x for x in vllms if any(salt in repr(x) for salt in salts)], "as we document"
        before = [x for x in stored if x["medium"] == "STORAGE"]
    finally:
        served.close()

    if not pytestconfig.getoption("--thorough"):
        return
    reader.forget()  # after a restart the inventory comes by itself, without a request
    served = serve(tmp_path, reader)
    try:
        reader.until(lambda: reader.held("STORAGE") == blocks)
        assert not reader.held("GPU")
        again = [x for x in reader.events if x["type"] == "BlockStored"]
        assert tokens_of(again) == tokens_of(before) != []
        assert again[0]["parent_block_hash"] is None
        served.run(served.server.forget(session("sleeper")))
        reader.until(lambda: not reader.held("STORAGE"))
    finally:
        served.close()


def tokens_of(events: list[dict]) -> list[int]:
    return [token for event in events for token in event["token_ids"]]
