"""The plug-in's parts on real sockets: two ranks with real stores, a gateway, no vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from engines.calibration.gate.served_codecs import ServedCodecs
from engines.config import CalibrationOrder
from engines.host.control_server import ControlServer
from engines.vllm_plugin.messages import RankHello, RankNews, Stage, Staged
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
from kvstore.blobs.chain import Piece
from kvstore.stats import Counters
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Blob
from tests.block_sessions import (
    BLOCK,
    chain_of,
    hashes,
    open_store,
    ram_and_disk,
    ref,
    rows_of,
    save,
    served,
    tokens_of,
)
from tests.kv_sessions import Rows
from tests.unit.engines import conftest
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool
from tests.waiting import until

CHAIN = hashes(tokens_of(24))  # twelve chunks

WELCOME = msgspec.structs.replace(conftest.WELCOME, engine="vllm")


async def welcomed() -> Welcome:
    return WELCOME


def verbs_of(hub: Hub, hot: ResidentSessions) -> VllmVerbs:
    """The verbs of an engine that runs no requests."""
    tracker: Any = SimpleNamespace(num_running=0, num_waiting=0, progress=list)
    known = {"counters": Counters(), "is_reported": lambda name: True}
    return VllmVerbs(hub, hot, tracker, block_tokens=BLOCK, **known)


class Unmeasured:
    """A rank that measures nothing."""

    has_verdict = True

    def __init__(self) -> None:
        self.begun: list[CalibrationOrder | None] = []
        self.progress = ""

    def begin(self, *, order: CalibrationOrder | None = None) -> None:
        self.begun.append(order)

    def with_progress(self, report: CodecReport) -> CodecReport:
        return msgspec.structs.replace(report, progress=self.progress)

    def receive(self, news: object) -> None:
        """The news is dropped."""

    def close(self) -> None:
        """There is nothing to end."""


class HeldRows(Rows):
    """Rows that are packed once the test lets it go on."""

    def __init__(self, store: ColdStore, blocks: Sequence[bytes], go_on: threading.Event) -> None:
        super().__init__(store, rows_of(blocks, 0, len(blocks)))
        self._go_on = go_on

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        assert self._go_on.wait(30)
        return super().pack(pieces)


def link_to(
    path: str,
    store: ColdStore,
    staging: StagingArea | None = None,
    *,
    hello: RankHello | None = None,
    codecs: ServedCodecs | None = None,
    measuring: Unmeasured | None = None,
) -> RankLink:
    """Connect a rank to the hub at ``path``."""
    return RankLink(
        path,
        hello or RankHello(0, 1000, 1000),
        store,
        BLOCK,
        StagingArea() if staging is None else staging,
        str,
        codecs or served(),
        measuring or Unmeasured(),
    )


class Engine:
    """Hub, control connection and two ranks, as in an engine with two workers."""

    def __init__(self, folder: Path) -> None:
        self.saved: list[RankNews] = []
        self.pool = Pool()
        self.hot = ResidentSessions()
        self.hot.bind(self.pool)
        self.hub = Hub(str(folder / "hub.sock"), 2, self.saved.append)
        self.verbs = verbs_of(self.hub, self.hot)
        self.address = str(folder / "control.sock")
        self.hub.start(ControlServer("secret", welcomed, self.verbs).serve(f"unix:{self.address}"))
        self.stores = [open_store(ram_and_disk(folder / f"disk{i}")) for i in range(2)]
        self.staging = [StagingArea(), StagingArea()]
        self.measurements = [Unmeasured(), Unmeasured()]
        self.links = [self._link(i, folder) for i in range(2)]
        until(lambda: self.hub.ready)

    def _link(self, i: int, folder: Path) -> RankLink:
        parts = {"hello": RankHello(i, 1000, 1000), "measuring": self.measurements[i]}
        return link_to(str(folder / "hub.sock"), self.stores[i], self.staging[i], **parts)

    def begin_save(self, session: str = "s") -> threading.Event:
        """Begin a save on every rank that ends once the returned event is set."""
        go_on = threading.Event()
        for store in self.stores:
            assert store.save(ref(session), chain_of(store, CHAIN), HeldRows(store, CHAIN, go_on))
        return go_on

    def close(self) -> None:
        for link, store in zip(self.links, self.stores, strict=True):
            link.close()
            store.close()
        self.hub.close()

    def save(self, session: str = "s", *, ranks: int = 2) -> None:
        for store in self.stores[:ranks]:
            save(store, ref(session), CHAIN)
            assert store.flush(200)

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
