"""The messages between the plug-in's processes, over the hub's socket in the runtime folder.

EngineCore with vLLM's scheduler, the workers and the HTTP server are separate processes. The hub
is in EngineCore; workers ("ranks") and the HTTP server ("front") connect to it. Frames have the
format of ``engines.wire``. This socket works while the engine sleeps, which vLLM's own channel
between scheduler and workers does not. Transfers of KV still use vLLM's channel, because only that
channel keeps them in order with the model's steps.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from engines.wire import (
    MAX_FRAME_BYTES,
    PAGE_BYTES,
    CodecReport,
    KVSize,
    SessionReport,
    Verb,
    WireError,
)
from kvstore.codecs.quality import Quality
from kvstore.session import MissReason, SessionRef, TierName
from kvstore.stats import StoreStats

ID_BYTES: Final = 4  # of a token's id among ``RankRests.ids``, little-endian


# ---- hub -> rank


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Order to read and verify the stored blobs of a prompt's blocks, and keep them for a load."""

    ticket: int
    session: SessionRef | None
    first_block: int  # the number of the first block to read
    hashes: bytes  # of the prompt's blocks from the first on, joined


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Order to drop the blobs staged under a ticket: they will not be loaded."""

    ticket: int


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Request for a report on one session."""

    session: SessionRef
    settled: bool = False  # wait for the saves under way first


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Order to carry out a control verb; ``RankAnswer`` with the same number is the answer."""

    number: int
    verb: Verb | Look


# ---- measuring requests: rank -> hub -> front -> hub -> rank


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Order for a measuring request. Every rank sends the same orders, one after the other.

    A rank repeats the order until the request is done: a message sent while there is no connection
    is lost.

    Attributes:
        tokens: the prompt.
        salt: the salt of vLLM's prefix cache.
        given: the number of the prompt's first tokens, in whole blocks, that get the KV that each
            rank has prepared.
        wanted_from: the number of the first prompt token whose KV is to be read; -1 reads none.
        scored: score the prompt's own tokens while it is prefilled.
    """

    rank: int
    number: int
    tokens: tuple[int, ...]
    salt: str
    given: int = 0
    wanted_from: int = -1
    scored: bool = False


class ForwardDone(msgspec.Struct, frozen=True, tag="forward-done"):
    """News that the measuring request has ended."""

    number: int
    error: str = ""  # why it failed


class Findings(msgspec.Struct, frozen=True, tag="findings"):
    """The quality figures of one rank, or the joint ones: the worst of all ranks, each by itself.

    A rank repeats its own figures until it gets the joint ones.
    """

    rows: tuple[Quality, ...]
    error: str = ""  # why a rank has given up, so that there are no figures
    rank: int = -1  # -1: these are the joint figures


class RunForward(msgspec.Struct, frozen=True, tag="run-forward"):
    """Order to an HTTP server to submit the request to vLLM."""

    ticket: str  # the secret that proves that a request carries out the order
    order: Forward


# ---- rank -> hub


class RankHello(msgspec.Struct, frozen=True, tag="rank"):
    """The first message of a rank; sent again when its codec changes."""

    rank: int
    bytes_per_token: int  # in vLLM's blocks, on this rank
    packed_bytes_per_token: int  # in a blob; an estimate without states
    live_kv: KVSize = KVSize()  # of this rank; see ``engines.wire.Welcome``
    bf16_kv: KVSize = KVSize()


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """The answer to ``Stage``: the blocks before ``end_block`` can be loaded."""

    ticket: int
    end_block: int
    tier: TierName | None
    reason: MissReason | None


class RankAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to ``Ask``; a long list of sessions is split into several answers."""

    number: int
    sessions: list[SessionReport]  # without the blocks that vLLM itself holds
    stats: StoreStats | None = None
    codec: CodecReport | None = None  # in answers to ``GetStats``, ``Adopt`` and ``Measure``
    tenants: dict[TierName, dict[str, int]] = {}  # in answers to ``LimitTenants``
    error: str = ""
    settled: bool = True  # False: the saves that a ``Look`` waits for are still under way
    more: bool = False  # more sessions come in the next message


class RankSaved(msgspec.Struct, frozen=True, tag="saved"):
    """News that a save has ended on this rank. All ranks report all saves, in the same order."""

    job: int
    session: SessionRef
    kept: bool  # False: skipped or failed


class RankLost(msgspec.Struct, frozen=True, tag="lost"):
    """News that a stored session is gone, is in a slower tier now, or takes less room."""

    session: SessionRef
    why: str = ""  # see ``StoreNotice``
    is_gone: bool = True


class RankRests(msgspec.Struct, frozen=True, tag="rests"):
    """News of rank 0: the tiers that hold a session's packed blocks, for readers of KV events."""

    session: SessionRef
    hashes: bytes = b""  # of its blocks, joined; empty if the session is gone
    ids: bytes = b""  # the ids of their tokens
    ram: int = 0  # how many of its blocks, from the first on, are in memory
    storage: int = 0  # how many, from the first on, are in slower tiers


# ---- front <-> hub


class FrontHello(msgspec.Struct, frozen=True, tag="front"):
    """The first message of an HTTP server: it accepts requests now."""


class RequestAdmitted(msgspec.Struct, frozen=True, tag="admitted"):
    """News that a request has begun to run."""

    answer_id: str
    cache: str  # the value of its cache header
    prompt_tokens: int = 0


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Order to make an idle engine run a step, since there is news for readers of KV events."""


ToRank: TypeAlias = Stage | Release | Ask | ForwardDone | Findings
ToFront: TypeAlias = RequestAdmitted | RunForward | Wake
RankNews: TypeAlias = RankSaved | RankLost | RankRests
PeerNews: TypeAlias = RankNews | Forward | ForwardDone | Findings
FromPeer: TypeAlias = RankHello | Staged | RankAnswer | PeerNews | FrontHello
Message: TypeAlias = ToRank | FromPeer | ToFront

_encoder = msgspec.msgpack.Encoder()
decode_to_rank = msgspec.msgpack.Decoder[ToRank](ToRank).decode
decode_from_peer = msgspec.msgpack.Decoder[FromPeer](FromPeer).decode
decode_to_front = msgspec.msgpack.Decoder[ToFront](ToFront).decode


def pages(answer: RankAnswer) -> Iterator[RankAnswer]:
    """Split an answer into several messages, each far below a frame's limit."""
    first = nbytes = 0
    for i, session in enumerate(answer.sessions):
        size = len(_encoder.encode(session))
        if i > first and nbytes + size > PAGE_BYTES:
            yield RankAnswer(answer.number, answer.sessions[first:i], more=True)
            first, nbytes = i, 0
        nbytes += size
    yield msgspec.structs.replace(answer, sessions=answer.sessions[first:])


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
