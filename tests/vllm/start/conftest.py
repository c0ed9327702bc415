"""vLLM's own server as the gateway starts it, for all tests of this folder that ask one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.vllm.conftest import FAULTY_RAW, model_path
from tests.vllm.rig.event_reader import EventReader
from tests.vllm.rig.faulty_codec import Faults
from tests.vllm.rig.served import Served, session
from tests.waiting import eventually

HISTORY = "The quick brown fox jumps over the lazy dog and runs far away. " * 40
STEP_TOKENS = 512


class Chats(Served):
    """The server, asked for chats."""

    def chat(self, name: str, tenant: str = "t", **fields):
        status, headers, answer = self.run(self.post(body_of(name, fields), session(name, tenant)))
        assert status == 200, answer
        return headers, answer

    def leave(self, names: Sequence[str], when: Callable[[], object], **fields) -> None:
        """Ask for all of these at once, and close the connections ``when`` it is time."""

        async def left() -> None:
            asking = [asyncio.create_task(self.post(body_of(x, fields), session(x))) for x in names]
            await self.until_served(len(names))
            await eventually(when)
            assert not any(x.done() for x in asking), "an answer came too early"
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

        self.run(left())


@pytest.fixture(scope="session")
def event_reader() -> Iterator[EventReader]:
    """Reads the events of ``vllm_server``."""
    reader = EventReader()
    yield reader
    reader.close()


@pytest.fixture(scope="session")
def vllm_server(
    faults: Faults, event_reader: EventReader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chats]:
    options = ("--max-num-batched-tokens", str(STEP_TOKENS))
    options += ("--kv-events-config", event_reader.config())
    served = Chats(tmp_path_factory.mktemp("server"), FAULTY_RAW, model_path(), *options)
    yield served
    faults.clear()
    served.close()


def body_of(name: str, fields: Mapping[str, object] = {}) -> dict[str, object]:
    """Every session's text is its own from the beginning, or they would share blocks."""
    return {
        "model": "smol",
        "messages": [{"role": "user", "content": f"This is {name}. {HISTORY}"}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }
