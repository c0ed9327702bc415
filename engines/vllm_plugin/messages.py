"""The messages between the plug-in's processes, over the hub's socket in the runtime folder.

EngineCore with vLLM's scheduler, the workers and the HTTP server are separate processes. The hub
is in EngineCore; workers ("ranks") and the HTTP server ("front") connect to it. Frames are those of
``engines.wire``. This socket works while the engine sleeps, which vLLM's own channel between
scheduler and workers does not. Transfers of KV still go through vLLM's channel, because only there
they are in order with the model's steps.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from engines.wire import MAX_FRAME_BYTES, PAGE_BYTES, CodecReport, KVSize, Verb, WireError
from kvstore.by_blocks.resting import BlockRuns
from kvstore.codecs.quality import Quality
from kvstore.session import MissReason, SessionRef, TierName
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
    """Order to read and verify what is stored of these blocks, and keep it for a load or release.

    ``hashes``: of the prompt's blocks from the first on, joined. ``first_block``: the first that
    is wanted.
    """

    ticket: int
    session: SessionRef | None
    first_block: int
    hashes: bytes


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Question how much of these blocks seems to be stored; nothing is read.

    The fields are those of ``Stage``. ``Staged`` is the answer, though nothing is staged.
    """

    ticket: int
    session: SessionRef | None
    first_block: int
    hashes: bytes


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Order to drop what is staged under a ticket: it will not be loaded."""

    ticket: int


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Question what is stored of one session. ``settled``: once the saves under way have ended."""

    session: SessionRef
    settled: bool = False


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A control verb to carry out; ``RankAnswer`` with the same number is the answer."""

    number: int
    verb: Verb | Look


# ---- a request that measures: rank -> hub -> front -> hub -> rank


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Order for a request that measures. Every rank sends the same ones, one after the other.

    It is sent again until it is done: a message that meets no connection is lost.

    ``tokens``: the prompt. ``forced``: tokens that the answer has; one more is sampled. ``salt``:
    of vLLM's prefix cache. ``given``: so many of the prompt's tokens get the KV that each rank has
    put ready, whole blocks. ``wanted_from``: the KV of the prompt's tokens from here on is wanted;
    -1: of none. ``scored``: the prompt's own tokens are scored while it is prefilled.
    """

    rank: int
    number: int
    tokens: tuple[int, ...]
    salt: str
    forced: tuple[int, ...] = ()
    given: int = 0
    wanted_from: int = -1
    scored: bool = False


class ForwardDone(msgspec.Struct, frozen=True, tag="forward-done"):
    """News that the request is over. ``error``: the reason why it gave nothing; "" if it did."""

    number: int
    error: str = ""


class RankFindings(msgspec.Struct, frozen=True, tag="findings"):
    """The figures of a rank, to be agreed on with the others, or why it has given up.

    Sent again until there is an answer.
    """

    rank: int
    rows: tuple[Quality, ...]
    error: str = ""


class JointFindings(msgspec.Struct, frozen=True, tag="joint-findings"):
    """The figures of all ranks together, of each the worst, or why there are none."""

    rows: tuple[Quality, ...]
    error: str = ""


class RunForward(msgspec.Struct, frozen=True, tag="run-forward"):
    """Order to an HTTP server to put the request to vLLM. ``ticket``: the secret that shows it."""

    ticket: str
    order: Forward


# ---- rank -> hub


class RankHello(msgspec.Struct, frozen=True, tag="rank"):
    """The first message of a rank; sent again when its codec changes."""

    rank: int
    codec: str  # id
    bytes_per_token: int  # in vLLM's blocks, on this rank
    packed_bytes_per_token: int  # in a blob; an estimate that leaves states out
    live_kv: KVSize = KVSize()  # of this rank; see ``engines.wire.Welcome``
    bf16_kv: KVSize = KVSize()


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """The answer to ``Stage``: the blocks before ``end_block`` can be loaded.

    ``part``: ids of the tokens after them whose rows can be loaded, too.
    """

    ticket: int
    end_block: int
    tier: TierName | None
    reason: MissReason | None
    part: tuple[int, ...] = ()


class RankAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to ``Ask``; a long list of sessions comes in several of them."""

    number: int
    sessions: list[RankSession]
    stats: StoreStats | None = None
    codec: CodecReport | None = None  # in answers to ``GetStats``, ``Adopt`` and ``Measure``
    error: str = ""
    pin_limit: str = ""  # the reason why a pin was refused
    more: bool = False  # more sessions come in the next message


class RankSaved(msgspec.Struct, frozen=True, tag="saved"):
    """News that a save has ended on this rank. Every rank reports every save, in one order."""

    job: int
    session: SessionRef
    kept: bool  # False: skipped or failed


class RankPacked(msgspec.Struct, frozen=True, tag="packed"):
    """News that what this rank has stored of a session takes less room than before."""

    session: SessionRef


class RankLost(msgspec.Struct, frozen=True, tag="lost"):
    """News that what was stored of a session is gone, or slower to reach."""

    session: SessionRef
    why: str = ""  # "budget", "share", "expired"
    is_gone: bool = True


class RankRests(msgspec.Struct, frozen=True, tag="rests"):
    """News where the blocks of a session rest packed on this rank, for readers of KV events.

    ``hashes``: of its blocks, joined; none: it is gone. ``ids``: of their tokens, as far as the
    record has them. ``ram``, ``storage``: see ``kvstore.by_blocks.resting``.
    """

    rank: int
    session: SessionRef
    hashes: bytes = b""
    ids: bytes = b""
    ram: BlockRuns = ()
    storage: BlockRuns = ()


# ---- front <-> hub


class FrontHello(msgspec.Struct, frozen=True, tag="front"):
    """The first message of an HTTP server: it takes requests now."""


class RequestAdmitted(msgspec.Struct, frozen=True, tag="admitted"):
    """News that a request begins to run; ``cache`` is the value of its cache header."""

    answer_id: str
    cache: str
    prompt_tokens: int = 0


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Order to make an idle engine run a step: it has news for readers of KV events."""


ToRank: TypeAlias = Stage | Probe | Release | Ask | ForwardDone | JointFindings
ToFront: TypeAlias = RequestAdmitted | RunForward | Wake
RankNews: TypeAlias = RankSaved | RankPacked | RankLost | RankRests
PeerNews: TypeAlias = RankNews | Forward | ForwardDone | RankFindings
FromPeer: TypeAlias = RankHello | Staged | RankAnswer | PeerNews | FrontHello
Message: TypeAlias = ToRank | FromPeer | ToFront

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_peer: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: Message) -> bytes:
    """The message as bytes, with its length before it. Raises ``WireError``: it is too long."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


def pages(answer: RankAnswer) -> Iterator[RankAnswer]:
    """The same answer as several messages, each far below a frame's limit."""
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


def decode_to_front(body: bytes) -> ToFront:
    return _to_front.decode(body)


def receive(connection: socket.socket) -> bytes:
    """Wait for one frame and return its body.

    Raises:
        EOFError: the connection ended.
        WireError: the frame is too long.
    """
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
