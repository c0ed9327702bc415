"""What the plug-in's parts say to each other, over the hub's socket in the runtime folder.

vLLM's scheduler and its workers are separate processes, and the HTTP server is a third. The hub
lives beside vLLM's scheduler; workers ("ranks") and the HTTP server ("front") connect to it. Frames
are those of ``engines.wire``. This socket works while the engine sleeps, which vLLM's own channel
between scheduler and workers does not; transfers of KV still go through that channel, because only
there they are in order with the model's steps.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from engines.wire import MAX_FRAME_BYTES, PAGE_BYTES, CodecReport, Verb, WireError
from kvstore.records import MissReason, SessionRef, TierName
from kvstore.stats import StoreStats


class RankSession(msgspec.Struct, frozen=True):
    """A session as one rank's store knows it."""

    tenant: str
    id: str
    tier: TierName | None
    tokens: int
    cold_bytes: int
    last_used_s: float
    pinned: bool


# ---- hub -> rank


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Read and verify what is stored of these blocks, and keep it for a load or a release.

    ``hashes`` are joined, from the prompt's first block on.
    """

    ticket: int
    session: SessionRef | None
    first_block: int
    hashes: bytes


class Peek(msgspec.Struct, frozen=True, tag="peek"):
    """How much of these blocks seems to be stored; nothing is read. As ``Stage`` otherwise.

    ``Staged`` is the answer, though nothing is staged.
    """

    ticket: int
    session: SessionRef | None
    first_block: int
    hashes: bytes


class Release(msgspec.Struct, frozen=True, tag="release"):
    ticket: int


class Look(msgspec.Struct, frozen=True, tag="look"):
    """What is stored of one session; changes nothing. ``settled``: after the saves under way."""

    session: SessionRef
    settled: bool = False


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int
    verb: Verb | Look


# ---- rank -> hub


class RankHello(msgspec.Struct, frozen=True, tag="rank"):
    rank: int
    codec: str  # id
    bytes_per_token: int  # hot, on this rank
    packed_bytes_per_token: int  # cold; about, and without what states take


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """Blocks ``.. end_block`` can be loaded, and as many rows behind them as follow ``part``."""

    ticket: int
    end_block: int
    tier: TierName | None
    reason: MissReason | None
    part: tuple[int, ...] = ()  # token ids


class RankAnswer(msgspec.Struct, frozen=True, tag="answer"):
    number: int
    sessions: list[RankSession]
    stats: StoreStats | None = None
    codec: CodecReport | None = None  # of who was asked for figures, or to adopt another
    error: str = ""
    pin_limit: str = ""  # why a pin was refused
    more: bool = False  # of the sessions; the rest comes next


class RankSaved(msgspec.Struct, frozen=True, tag="saved"):
    """A save has ended here. Every rank says so of every save, in the same order."""

    job: int
    session: SessionRef
    kept: bool  # False: skipped or failed


class RankLost(msgspec.Struct, frozen=True, tag="lost"):
    """What was stored of a session is gone, by ttl or eviction."""

    session: SessionRef


# ---- front <-> hub


class FrontHello(msgspec.Struct, frozen=True, tag="front"):
    pass


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """A request begins to run; ``cache`` is the value of the cache header."""

    mark: str
    cache: str


ToRank: TypeAlias = Stage | Peek | Release | Ask
RankNews: TypeAlias = RankSaved | RankLost
FromPeer: TypeAlias = RankHello | Staged | RankAnswer | RankNews | FrontHello
Message: TypeAlias = ToRank | FromPeer | Admitted
Role: TypeAlias = Literal["rank", "front"]

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_peer: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)
_admitted: msgspec.msgpack.Decoder[Admitted] = msgspec.msgpack.Decoder(Admitted)


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


def pages(answer: RankAnswer) -> Iterator[RankAnswer]:
    """The same answer in pieces, each far below a frame's limit."""
    first = nbytes = 0
    for i, session in enumerate(answer.sessions):
        size = len(_encoder.encode(session))
        if i > first and nbytes + size > PAGE_BYTES:
            yield RankAnswer(answer.number, answer.sessions[first:i], more=True)
            first, nbytes = i, 0
        nbytes += size
    yield msgspec.structs.replace(answer, sessions=answer.sessions[first:])


def decode_to_rank(body: bytes) -> ToRank:
    return _to_rank.decode(body)


def decode_from_peer(body: bytes) -> FromPeer:
    return _from_peer.decode(body)


def decode_admitted(body: bytes) -> Admitted:
    return _admitted.decode(body)


def receive(connection: socket.socket) -> bytes:
    """One frame's body, blocking. Raises ``EOFError`` at the end of the connection."""
    length = int.from_bytes(_exactly(connection, 4), "big")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes is over {MAX_FRAME_BYTES}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the connection ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
