"""Connects a rank's cold store to the hub: stages blobs for loads, carries out verbs."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from engines.calibration.gate.served_codecs import ServedCodecs
from engines.vllm_plugin.messages import (
    Ask,
    Findings,
    ForwardDone,
    Look,
    Message,
    RankAnswer,
    RankHello,
    Release,
    Stage,
    Staged,
    ToRank,
    decode_to_rank,
    pages,
    receive,
)
from engines.vllm_plugin.worker.resting_watch import RestingWatch
from engines.wire import (
    Adopt,
    CodecReport,
    Demote,
    Forget,
    GetStats,
    LimitTenants,
    ListSessions,
    Measure,
    Pin,
    Prefetch,
    SessionReport,
    Unpin,
    Verb,
    absent,
    frame,
)
from kvstore.blobs.chain import split
from kvstore.errors import StoreClosed
from kvstore.ledger.record import SessionRecord
from kvstore.session import SessionRef
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Fetched

if TYPE_CHECKING:
    from engines.vllm_plugin.measuring.rank_measuring import RankMeasuring

logger = logging.getLogger("thermocline.vllm")

RETRY_S: Final = 0.1
# The restores that read at the same time; others wait, so that each makes progress.
NUM_STAGERS: Final = 4
NUM_VERB_THREADS: Final = 8  # some wait for saves
SETTLE_S: Final = 5.0
FORGET_S: Final = 60.0
_CHANGES: Final = (Demote, Prefetch, Forget, Look)  # change a session's tiers, or wait for changes
_ABOUT_CODECS: Final = (GetStats, Adopt, Measure)


def packed_bytes_per_token(store: ColdStore) -> int:
    """The bytes of a stored token in memory: an estimate without states."""
    return store.packer.rows_nbytes(0, store.chunk_tokens) // store.chunk_tokens


@dataclass(frozen=True)
class StagedBlobs:
    """The verified blobs of a prompt, and the hashes of the prompt's blocks."""

    fetched: Fetched
    hashes: list[bytes]


class StagingArea:
    """Verified blobs that wait for their load, by ticket. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._staged: dict[int, StagedBlobs | None] = {}  # None: wanted, and not read yet

    def expect(self, ticket: int) -> None:
        """Note that blobs for this ticket are wanted from now on."""
        with self._lock:
            self._staged[ticket] = None

    def clear(self) -> None:
        """Drop all tickets and blobs."""
        with self._lock:
            self._staged.clear()

    def put(self, ticket: int, blobs: StagedBlobs) -> None:
        """Keep the blobs read for this ticket, unless the ticket was given up."""
        with self._lock:
            if ticket in self._staged:
                self._staged[ticket] = blobs

    def take(self, ticket: int) -> StagedBlobs | None:
        """Return the blobs read for this ticket; None if there are none. Ends the ticket."""
        with self._lock:
            return self._staged.pop(ticket, None)

    def is_wanted(self, ticket: int) -> bool:
        return ticket in self._staged

    def __len__(self) -> int:
        """The number of tickets that are wanted."""
        return len(self._staged)


class RankLink:
    """The connection to the hub: one thread receives messages, a few others carry them out."""

    def __init__(
        self,
        path: str,
        hello: RankHello,
        store: ColdStore,
        block_tokens: int,
        staging: StagingArea,
        why_host: Callable[[], str],
        codecs: ServedCodecs,
        measuring: RankMeasuring,
    ) -> None:
        """Connect from now on. ``why_host`` returns why the host packs: see ``Blocks``."""
        self._path = path
        self._hello = hello
        self._store = store
        self._block_tokens = block_tokens
        self._staging = staging
        self._why_host = why_host
        self._codecs = codecs
        self._measuring = measuring
        self._sending = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False
        self._resting: RestingWatch | None = None
        self._stagers = ThreadPoolExecutor(NUM_STAGERS, "thermocline-stage")
        self._staging_now: set[Future[None]] = set()
        self._verb_threads = ThreadPoolExecutor(NUM_VERB_THREADS, "thermocline-verbs")
        self._thread = threading.Thread(target=self._run, name="thermocline-rank", daemon=True)
        self._thread.start()

    def watch(self, resting: RestingWatch) -> None:
        """Report to ``resting`` which sessions verbs change, and each new connection."""
        self._resting = resting
        resting.start_over()

    @property
    def num_staging(self) -> int:
        """The number of restores that are being read or wait to be read."""
        return len(self._staging_now)

    def send(self, message: Message) -> None:
        """Send the message; without a connection it is dropped, and the receiver times out."""
        self._send_on(self._connection, message)

    def close(self) -> None:
        """End the connection without waiting for running work.

        A tier that hangs must not keep the store from its last flush. The answers of work that
        still runs are dropped; the work ends when the store closes.
        """
        self._closed = True
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._stagers.shutdown(wait=False, cancel_futures=True)
        self._verb_threads.shutdown(wait=False, cancel_futures=True)

    def _session(self, record: SessionRecord) -> SessionReport:
        return msgspec.structs.replace(
            absent(SessionRef(record.tenant, record.id, b"")),
            tier=self._store.tier_of(record),
            tokens=record.num_tokens,
            cold_tokens=record.num_tokens,
            cold_bytes=record.packed_bytes,
            idle_s=max(0.0, time.time() - record.last_used_s),
            pinned=record.pinned,
        )

    def _run(self) -> None:
        """Connect repeatedly: the hub starts later than the workers, and may restart."""
        while not self._closed:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.connect(self._path)
                    self._listen(connection)
            except (OSError, EOFError):
                pass  # the hub has not started yet, or has ended
            except Exception:  # top level of this thread; without it no session could be restored
                if not self._closed:
                    logger.exception("the connection to the hub failed and is made anew")
            finally:
                self._connection = None
            if not self._closed:
                time.sleep(RETRY_S)

    def _listen(self, connection: socket.socket) -> None:
        """Serve one connection to its end; first drop the blobs that an earlier one had staged."""
        with self._sending:
            self._staging.clear()
            connection.sendall(frame(self._hello))
            self._connection = connection
        if self._resting is not None:
            self._resting.start_over()
        while not self._closed:
            self._receive(decode_to_rank(receive(connection)), connection)

    def _receive(self, message: ToRank, connection: socket.socket) -> None:
        match message:
            case Stage():
                self._staging.expect(message.ticket)
                staging = self._stagers.submit(self._stage, message, connection)
                self._staging_now.add(staging)
                staging.add_done_callback(self._staging_now.discard)
            case Release():
                self._staging.take(message.ticket)
            case Ask():
                self._verb_threads.submit(self._answer, message, connection)
            case ForwardDone() | Findings():
                self._measuring.receive(message)

    def _send_on(self, connection: socket.socket | None, message: Message) -> None:
        """Send a message, but only if the connection of its question is still the current one.

        A hub that has restarted counts its tickets from 1 again.
        """
        with self._sending, suppress(OSError):
            if connection is not None and connection is self._connection:
                connection.sendall(frame(message))

    def _stage(self, message: Stage, connection: socket.socket) -> None:
        try:
            if not self._staging.is_wanted(message.ticket):
                return
            hashes = split(message.hashes)
            chain = self._store.maker.of_blocks(hashes, self._block_tokens)
            first = message.first_block // self._chunk_blocks
            fetched = self._store.fetch(self._store.match(message.session, chain, first))
        except StoreClosed:
            return
        except Exception:  # top level of this thread: a defect here costs only a prefill
            logger.exception("a session could not be staged")
            hashes, fetched = [], Fetched(0, [], None, "unavailable")
        with self._sending:  # so that no other connection begins meanwhile
            if connection is not self._connection:
                return
            self._staging.put(message.ticket, StagedBlobs(fetched, hashes))
        end = max(fetched.num_chunks * self._chunk_blocks, message.first_block)
        self._send_on(connection, Staged(message.ticket, end, fetched.tier, fetched.reason))

    @property
    def _chunk_blocks(self) -> int:
        return self._store.chunk_tokens // self._block_tokens

    def _answer(self, message: Ask, connection: socket.socket) -> None:
        verb = message.verb
        try:
            is_settled = True
            if isinstance(verb, Look) and verb.settled:  # it waits; others do not
                is_settled = self._store.wait_saved(verb.session, SETTLE_S)
            records = self._execute(verb)
            if self._resting is not None and isinstance(verb, _CHANGES):
                self._resting.look_at(verb.session)  # before the caller continues
            answer = RankAnswer(
                message.number,
                [self._session(x) for x in records],
                self._store.stats() if isinstance(verb, GetStats) else None,
                self._report() if isinstance(verb, _ABOUT_CODECS) else None,
                self._store.limit_tenants(verb.tiers) if isinstance(verb, LimitTenants) else {},
                settled=is_settled,
            )
        except StoreClosed:
            return
        except Exception as error:  # top level of this thread: the caller must get an answer
            logger.exception("%s failed", type(verb).__name__)
            answer = RankAnswer(message.number, [], error=f"{type(error).__name__}: {error}")
        for page in pages(answer):
            self._send_on(connection, page)

    def _report(self) -> CodecReport:
        report = msgspec.structs.replace(self._codecs.report, why_host=self._why_host())
        return self._measuring.with_progress(report)

    def adopt(self) -> None:
        """Make the store adopt the codecs that the model's profile allows now."""
        self._codecs.renew(self._store.adopt)
        packed = packed_bytes_per_token(self._store)
        self._hello = msgspec.structs.replace(self._hello, packed_bytes_per_token=packed)
        self.send(self._hello)  # the hub uses it to estimate the bytes of a restore

    def _execute(self, verb: Verb | Look) -> list[SessionRecord]:
        """Carry out a verb, and return the records that the answer is about."""
        match verb:
            case ListSessions():
                return self._store.records()
            case Adopt():
                self.adopt()
                return []
            case Measure(order):
                self._measuring.begin(order=order)
                return []
            case Demote(session, tier) if tier is not None:
                self._store.demote(session, tier)
            case Prefetch(session):
                self._store.warm(session)
            case Pin(session) | Unpin(session):
                self._store.wait_saved(session, SETTLE_S)  # only a saved session can be pinned
                self._store.pin(session, isinstance(verb, Pin))
            case Forget(session):
                # A save that ended later would bring the session back.
                if not self._store.wait_saved(session, FORGET_S):
                    raise TimeoutError("a save of the session does not end")
                self._store.forget(session)
            case Look() | Demote():
                pass
            case _:
                return []
        record = self._store.record(verb.session)
        return [record] if record else []
