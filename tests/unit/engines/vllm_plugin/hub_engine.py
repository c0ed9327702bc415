"""The plug-in's parts on real sockets: two ranks with real stores, a gateway, no vLLM."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engines.control_server import ControlServer
from engines.vllm_plugin.hot import HotSessions
from engines.vllm_plugin.hub import Hub
from engines.vllm_plugin.messages import (
    RankHello,
    RankNews,
    Stage,
    Staged,
)
from engines.vllm_plugin.rank import RankLink, StagingArea
from engines.vllm_plugin.verbs import Verbs
from engines.wire import (
    Answer,
    CodecReport,
    Done,
    Hello,
    Reply,
    Request,
    SessionReport,
    Verb,
    Welcome,
    frame,
    read_from_engine,
)
from kvstore.block_store import BlockStore
from kvstore.records import SessionRef
from kvstore.stats import Counters
from tests.block_sessions import BLOCK, hashes, open_store, ram_and_disk, ref, save, served
from tests.unit.engines.vllm_plugin.scheduler_bench import Pool

CHAIN = hashes(list(range(100)))


WELCOME = Welcome(
    engine="vllm",
    engine_version="0",
    model="m",
    max_context=1,
    codec=CodecReport(name="raw"),
    hibernation=True,
)


async def welcomed() -> Welcome:
    return WELCOME


class Engine:
    """Hub, control connection and two ranks, as in an engine with two workers."""

    def __init__(self, folder: Path) -> None:
        self.saved: list[RankNews] = []
        self.waited: list[str] = []
        self.unsaved = self.endless = ""
        self.settled = threading.Event()
        self.pool = Pool()
        self.hot = HotSessions()
        self.hot.bind(self.pool)
        self.hub = Hub(str(folder / "hub.sock"), 2, self.saved.append)
        self.verbs = Verbs(
            self.hub, self.hot, block_tokens=BLOCK, counters=Counters(), num_requests=lambda: (0, 0)
        )
        self.address = str(folder / "control.sock")
        self.hub.start(ControlServer("secret", welcomed, self.verbs).serve(f"unix:{self.address}"))
        self.stores = [open_store(ram_and_disk(folder / f"disk{i}")) for i in range(2)]
        self.staging = [StagingArea(), StagingArea()]
        self.links = [self._link(i, folder) for i in range(2)]
        wait(lambda: self.hub.ready)

    def _link(self, i: int, folder: Path) -> RankLink:
        store: BlockStore = self.stores[i]
        hello = RankHello(i, "raw.1", 1000, 1000)
        path = str(folder / "hub.sock")
        return RankLink(
            path, hello, store, self.staging[i], store.stats, self._wait_saved, served()
        )

    def _wait_saved(self, session: SessionRef, within_s: float) -> bool:
        """A save of this session ends, as it were, while somebody waits for it."""
        self.waited.append(session.id)
        if self.endless == session.id:
            return False
        if self.unsaved and len(self.waited) == 2:
            self.save(self.unsaved)
            self.settled.set()
        assert not self.unsaved or self.settled.wait(within_s)
        return True

    def close(self) -> None:
        for link, store in zip(self.links, self.stores, strict=True):
            link.close()
            store.close()
        self.hub.close()

    def save(self, session: str = "s", *, ranks: int = 2) -> None:
        for store in self.stores[:ranks]:
            save(store, ref(session), CHAIN)
            assert store.flush(10)

    def stage(self, ticket: int = 1, first: int = 0) -> Staged:
        self.hub.send(Stage(ticket, ref(), first, b"".join(CHAIN)))
        found: list[Staged] = []
        wait(lambda: found.extend(x for x in [self.hub.staged(ticket)] if x) or bool(found))
        return found[0]

    async def verbs_list(self) -> list[SessionReport]:
        """As the control connection asks for it: on the hub's own loop."""
        listing = asyncio.run_coroutine_threadsafe(self.verbs.sessions(), self.hub._loop)
        return await asyncio.wrap_future(listing)

    def ask(self, verb: Verb, token: str = "secret") -> Answer:
        async def conversation() -> Answer:
            reader, writer = await asyncio.open_unix_connection(self.address)
            writer.write(frame(Request(0, Hello(token))) + frame(Request(1, verb)))
            while True:
                message = await read_from_engine(reader)
                if isinstance(message, Reply) and message.number == 1:
                    writer.close()
                    return message.answer

        return asyncio.run(conversation())

    def done(self, verb: Verb) -> Done:
        answer = self.ask(verb)
        assert isinstance(answer, Done), answer
        return answer


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)
