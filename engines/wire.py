"""Control messages between the gateway and an engine process, and their framing.

A frame is a four-byte big-endian length and a msgpack body of at most ``MAX_FRAME_BYTES``. The
gateway sends ``Request``; the engine answers each with one ``Reply`` of the same number and may
send ``Notice`` at any time. KV bytes never travel here.

The same verbs serve every engine: demote, prefetch, pin, unpin, forget, sessions, stats, adopt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal, TypeAlias, TypeVar

import msgspec

from kvstore.codecs.quality import Quality
from kvstore.records import SessionRef as SessionRef
from kvstore.records import TierName as TierName

WIRE_VERSION = 3
MAX_FRAME_BYTES = 16 << 20
# Of sessions in one reply. Far below a frame's limit, and decoded on an event loop.
PAGE_BYTES = 4 << 20

# Request headers of the data plane that only the gateway may set.
TENANT_HEADER = "x-thermocline-tenant"
SESSION_HEADER = "x-thermocline-session"  # percent-encoded UTF-8
SALT_HEADER = "x-thermocline-salt"  # hex
# Response header of the data plane: "hot", "cold-ram", "cold-disk", "cold-redis" or "miss",
# then "; tokens=N" and, where something was not reused, "; reason=WORD".
CACHE_HEADER = "x-thermocline-cache"


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine knows of a session right now."""

    tenant: str
    id: str
    hot: bool
    tier: TierName | None  # fastest tier that holds its cold copy; None = no cold copy
    tokens: int
    hot_bytes: int
    cold_bytes: int
    idle_s: float
    pinned: bool
    busy: bool  # a request of this session is being served


def absent(session: SessionRef) -> SessionReport:
    """Of a session that the engine does not know, or no longer."""
    return SessionReport(
        tenant=session.tenant,
        id=session.id,
        hot=False,
        tier=None,
        tokens=0,
        hot_bytes=0,
        cold_bytes=0,
        idle_s=0.0,
        pinned=False,
        busy=False,
    )


class TierReport(msgspec.Struct, frozen=True):
    name: TierName
    nbytes: int
    capacity_bytes: int
    num_blobs: int
    evictions: int
    errors: int
    available: bool


class CodecReport(msgspec.Struct, frozen=True, kw_only=True):
    """What sessions are packed with from now on, and why."""

    name: str  # of the preset; of the fastest tier, should others have their own
    id: str = ""  # of the codec, with the digits of its profile
    tiers: dict[TierName, str] = {}  # id of each tier's
    why: str = ""  # in words, with the figures
    # What they cost this model, a row for each context length; none if exact or not measured.
    rows: tuple[Quality, ...] = ()
    # Nothing was measured of what the settings ask for; a calibration would tell.
    unmeasured: bool = False
    fingerprint: str = ""  # of the model, by which its profile is named


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of the engine. All counters only grow.

    Its store's are those of ``kvstore.stats.StoreStats``, but misses are counted per turn. Its own:
    ``prompts``, ``prompt_tokens``, ``cached_tokens``, ``source.<where the KV came from>``,
    ``misses.<reason>``; ``turns``, ``failed_turns``, ``generated_tokens``; ``sent_back``: rows that
    had to make room and wait again. ``keep_failures``: sessions whose KV could not be kept after a
    turn, or not be given to the store. ``rebuild_failures`` (mlx) and ``loads_failed`` (vLLM):
    restored KV that was no use, and was computed again.
    """

    hot_bytes: int  # measured: idle hot sessions and running requests together
    idle_hot_bytes: int  # of these, what dropping idle sessions would free
    hot_capacity_bytes: int
    active_bytes: int  # all memory the tensor library holds, weights included
    num_running: int
    num_waiting: int
    save_queue_bytes: int
    tiers: list[TierReport]
    counters: dict[str, int]
    codec: CodecReport | None = None  # None: it did not say


# ---- gateway -> engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    token: str
    version: int = WIRE_VERSION


class Demote(msgspec.Struct, frozen=True, tag="demote"):
    """Drop the hot copy, once a cold copy exists; ``tier`` also moves the cold copy down."""

    session: SessionRef
    tier: TierName | None = None


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Make the session hot before its next turn."""

    session: SessionRef


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    session: SessionRef


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    session: SessionRef


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Remove the session from every tier, for good."""

    session: SessionRef


class ListSessions(msgspec.Struct, frozen=True, tag="sessions"):
    """One page of all sessions, in the order of (tenant, id), that come behind ``after``."""

    after: tuple[str, str] | None = None  # tenant and id; None = from the start


class GetStats(msgspec.Struct, frozen=True, tag="stats"):
    pass


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Look again at what was measured on this model, and pack with the codec that follows.

    What is stored stays readable, whatever it was packed with.
    """


Verb: TypeAlias = Hello | Demote | Prefetch | Pin | Unpin | Forget | ListSessions | GetStats | Adopt


# ---- engine -> gateway


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    engine: str  # "mlx", "vllm", "fake"
    engine_version: str
    model: str  # served name
    max_context: int
    codec: CodecReport
    hibernation: bool
    hibernation_reason: str = ""  # why not, in one sentence
    version: int = WIRE_VERSION


class Done(msgspec.Struct, frozen=True, tag="done"):
    """``report`` is None where the session is unknown. ``kept`` says why a demote did nothing."""

    report: SessionReport | None
    kept: str = ""  # "busy", "pinned", "no-cold-copy", "disabled"


class Sessions(msgspec.Struct, frozen=True, tag="session_list"):
    sessions: list[SessionReport]
    more: bool = False  # ask again, ``after`` the last of these


class Stats(msgspec.Struct, frozen=True, tag="engine_stats"):
    report: EngineReport


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    codec: CodecReport


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    message: str
    code: Literal["", "pin_limit"] = ""  # of refusals that are no failure, but an answer


Answer: TypeAlias = Welcome | Done | Sessions | Stats | Adopted | Refused


class Request(msgspec.Struct, frozen=True, tag="request"):
    number: int
    verb: Verb


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    number: int
    answer: Answer


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """A session changed: saved after a turn, evicted by the engine, lost, restored."""

    cause: Literal["saved", "dropped", "restored", "lost", "turn"]
    session: SessionReport


FromEngine: TypeAlias = Reply | Notice

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(Reply | Notice)


class WireError(Exception):
    """The peer does not speak this protocol; the connection is of no further use."""


def frame(message: Request | Reply | Notice) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a control message of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


def page_of(reports: Iterable[SessionReport], after: tuple[str, str] | None) -> Sessions:
    """The page that ``ListSessions(after)`` asks for: at most ``PAGE_BYTES``, at least one."""
    rest = sorted(
        (x for x in reports if after is None or (x.tenant, x.id) > after),
        key=lambda x: (x.tenant, x.id),
    )
    nbytes = 0
    for i, report in enumerate(rest):
        nbytes += len(_encoder.encode(report))
        if i and nbytes > PAGE_BYTES:
            return Sessions(rest[:i], more=True)
    return Sessions(rest)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Raises ``WireError`` for a broken frame, ``asyncio.IncompleteReadError`` at the end."""
    return _decode(_request_decoder, await _read_body(reader))


async def read_from_engine(reader: asyncio.StreamReader) -> FromEngine:
    """Raises as ``read_request`` does."""
    return _decode(_from_engine_decoder, await _read_body(reader))


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a control frame of {length} bytes is over {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)


T = TypeVar("T")


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a control message: {error}") from error
