"""A router that reads vLLM's KV events knows of every session that sleeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.rig.served import session

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]


def stored_in(events: list[dict[str, Any]], medium: str) -> list[dict[str, Any]]:
    return [x for x in events if x["type"] == "BlockStored" and x["medium"] == medium]


def test_a_router_finds_what_sleeps_and_nothing_that_was_deleted(vllm_server, event_reader):
    def blocks_of(name: str, tenant: str) -> set[bytes]:
        """Chat, and return the blocks that vLLM says are new on its device."""
        vllm_server.wait_all_saved()
        while event_reader.read(0.5):  # what earlier tests have left
            pass
        start = len(event_reader.events)
        vllm_server.chat(name, tenant)
        vllm_server.wait_saved(name)
        event_reader.until(lambda: stored_in(event_reader.events[start:], "CPU"))
        stored = stored_in(event_reader.events[start:], "GPU")
        return {h for event in stored for h in event["block_hashes"]}

    def held(medium: str, blocks: set[bytes]) -> set[bytes]:
        return event_reader.held(medium) & blocks

    asleep = blocks_of("sleeper", "t")
    assert len(asleep) > 10
    # Of an engine that has nothing to do.
    event_reader.until(lambda: held("CPU", asleep) == held("STORAGE", asleep) == asleep)

    # A reader finds every block at every moment, in the order in which events come.
    vllm_server.run(vllm_server.server.demote(session("sleeper"), "disk"))
    event_reader.until(lambda: not held("GPU", asleep) and not held("CPU", asleep))
    assert held("STORAGE", asleep) == asleep
    events = event_reader.events
    first_gone = next(
        i
        for i, x in enumerate(events)
        if x["type"] == "BlockRemoved" and asleep & set(x["block_hashes"])
    )
    for medium in ("GPU", "CPU", "STORAGE"):
        stored = stored_in(events[:first_gone], medium)
        assert asleep <= {h for x in stored for h in x["block_hashes"]}, medium

    other = blocks_of("other", "u")
    event_reader.until(lambda: held("CPU", other) == held("STORAGE", other) == other)
    assert vllm_server.run(vllm_server.server.forget(session("other", "u"))) is not None
    event_reader.until(lambda: not any(held(x, other) for x in ("GPU", "CPU", "STORAGE")))
    assert held("STORAGE", asleep) == asleep
    ours = [x for x in events if x.get("medium") != "GPU"]
    vllms = [x for x in events if x.get("medium") == "GPU"]
    salts = {session("sleeper").salt.hex(), session("other", "u").salt.hex()}
    assert not [x for x in ours if any(salt in repr(x) for salt in salts)]
    assert [x for x in vllms if any(salt in repr(x) for salt in salts)], "as we document"
