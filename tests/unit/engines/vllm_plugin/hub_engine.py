"""The plug-in's parts on real sockets: two ranks with real stores, a gateway, no vLLM."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec

from engines.config import CalibrationOrder
from engines.host.control_server import ControlServer
from engines.vllm_plugin.messages import (
    RankHello,
    RankNews,
    Stage,
    Staged,
)
from engines.vllm_plugin.scheduler.hub import Hub
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.verbs import VllmVerbs
from engines.vllm_plugin.worker.rank import RankLink, StagingArea
from engines.wire import (
    CodecReport,
    ControlReply,
    ControlRequest,
    Done,
    Hello,
    SessionReport,
    Verb,
    VerbAnswer,
    Welcome,
    frame,
    read_from_engine,
)
from kvstore.session import SessionRef
from kvstore.stats import Counters
from kvstore.store.block_store import BlockStore
from tests.block_sessions import BLOCK, hashes, open_store, ram_and_disk, ref, save, served
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool
from tests.waiting import until

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


class Unmeasured:
    """A rank that measures nothing."""

    def __init__(self) -> None:
        self.begun: list[CalibrationOrder | None] = []
        self.progress = ""

    def begin(self, *, order: CalibrationOrder | None = None) -> None:
        self.begun.append(order)

    def with_progress(self, report: CodecReport) -> CodecReport:
        return msgspec.structs.replace(report, progress=self.progress)

    def hear(self, news: object) -> None:
        """The news is dropped."""


class NoSaves:
    """A rank whose saves are over; the host packs for ``why_host``."""

    queued_bytes = 0

    def __init__(self, why_host: str = "") -> None:
        self.why_host = why_host

    def wait_saved(self, session: SessionRef, within_s: float) -> bool:
        return True


class Engine:
    """Hub, control connection and two ranks, as in an engine with two workers."""

    def __init__(self, folder: Path) -> None:
        self.saved: list[RankNews] = []
        self.waited: list[str] = []
        self.why_host = ""
        self.unsaved = self.endless = ""
        self.settled = threading.Event()
        self.pool = Pool()
        self.hot = ResidentSessions()
        self.hot.bind(self.pool)
        self.hub = Hub(str(folder / "hub.sock"), 2, self.saved.append)
        self.verbs = VllmVerbs(
            self.hub, self.hot, block_tokens=BLOCK, counters=Counters(), num_requests=lambda: (0, 0)
        )
        self.address = str(folder / "control.sock")
        self.hub.start(ControlServer("secret", welcomed, self.verbs).serve(f"unix:{self.address}"))
        self.stores = [self._store(i, folder) for i in range(2)]
        self.staging = [StagingArea(), StagingArea()]
        self.measurements = [Unmeasured(), Unmeasured()]
        self.links = [self._link(i, folder) for i in range(2)]
        until(lambda: self.hub.ready)
        self._folder = folder

    def restart_rank(self, i: int, **config: Any) -> None:
        """End rank ``i`` and start it again, with these fields of its store's configuration."""
        self.links[i].close()
        self.stores[i].close()
        until(lambda: not self.hub.ready)
        self.stores[i] = self._store(i, self._folder, **config)
        self.links[i] = self._link(i, self._folder)
        until(lambda: self.hub.ready)

    def _store(self, i: int, folder: Path, **config: Any) -> BlockStore:
        return open_store(ram_and_disk(folder / f"disk{i}"), **config)

    def _link(self, i: int, folder: Path) -> RankLink:
        store: BlockStore = self.stores[i]
        hello = RankHello(i, "raw.1", 1000, 1000)
        path = str(folder / "hub.sock")
        return RankLink(path, hello, store, self.staging[i], self, served(), self.measurements[i])

    queued_bytes = 0

    def wait_saved(self, session: SessionRef, within_s: float) -> bool:
        """Plays a save of this session that ends while a verb waits for it."""
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
        until(lambda: found.extend(x for x in [self.hub.staged(ticket)] if x) or bool(found))
        return found[0]

    async def verbs_list(self) -> list[SessionReport]:
        """List the sessions on the hub's own event loop, like the control connection."""
        listing = self.hub.submit(self.verbs.sessions())
        return await asyncio.wrap_future(listing)

    def ask(self, verb: Verb, token: str = "secret") -> VerbAnswer:
        async def conversation() -> VerbAnswer:
            reader, writer = await asyncio.open_unix_connection(self.address)
            writer.write(frame(ControlRequest(0, Hello(token))) + frame(ControlRequest(1, verb)))
            while True:
                message = await read_from_engine(reader)
                if isinstance(message, ControlReply) and message.number == 1:
                    writer.close()
                    return message.answer

        return asyncio.run(conversation())

    def done(self, verb: Verb) -> Done:
        answer = self.ask(verb)
        assert isinstance(answer, Done), answer
        return answer
