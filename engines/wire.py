"""Control messages between the gateway and an engine process, and their framing.

A frame is a four-byte big-endian length and a msgpack body of at most ``MAX_FRAME_BYTES``. The
gateway sends ``ControlRequest``; the engine answers each with one ``ControlReply`` of the same
number, and may send ``Notice`` at any time. KV bytes never travel here.

Every engine obeys all verbs; whether its model can be measured now, its ``Welcome`` says.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from engines.config import CalibrationOrder
from kvstore.codecs.quality import Quality
from kvstore.session import KVSize as KVSize
from kvstore.session import SessionRef as SessionRef
from kvstore.session import TenantLimits
from kvstore.session import TierName as TierName
from kvstore.stats import Repacking
from kvstore.stats import TierStats as TierStats

WIRE_VERSION = 3
MAX_FRAME_BYTES = 16 << 20
# Bytes of sessions in one reply: far below a frame's limit, since an event loop decodes them.
PAGE_BYTES = 4 << 20
BF16_BYTES = 2


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's knowledge of one session at this moment; by default it has nothing of it."""

    tenant: str
    id: str
    hot: bool = False
    tier: TierName | None = None  # slowest tier that a restore reads; None = no cold copy
    tokens: int = 0
    hot_bytes: int = 0
    cold_bytes: int = 0
    idle_s: float = 0.0
    pinned: bool = False
    busy: bool = False  # a request of this session is being served
    cold_tokens: int = 0  # tokens whose packed KV takes ``cold_bytes``; 0: not reported


def absent(session: SessionRef) -> SessionReport:
    """Make the report of a session that the engine does not have."""
    return SessionReport(tenant=session.tenant, id=session.id)


class MeasurementEnd(msgspec.Struct, frozen=True):
    """The end of the last measurement of the model in this life of the engine."""

    at: float  # seconds since the epoch
    error: str = ""  # the reason if it failed; "" = its figures are in the report


class CodecReport(msgspec.Struct, frozen=True, kw_only=True):
    """The codec that sessions are packed with from now on, and the reason for this choice."""

    name: str  # of the preset
    id: str = ""  # the codec's id, with the digits of its profile
    why: str = ""  # the reason in words, with the figures
    # The measured cost on this model, a row per context length; empty if exact or not measured.
    rows: tuple[Quality, ...] = ()
    others: tuple[Quality, ...] = ()  # the same of codecs not in use: refused ones, floors
    # True if the codec of the settings was never measured; ``Measure`` does that.
    unmeasured: bool = False
    fingerprint: str = ""  # of the model; names its profile
    # The progress of a measurement, such as "measuring: 3 of 12 cases", or, after the verdict,
    # "measuring more: 5 of 96 texts to learn from"; "" = none runs.
    progress: str = ""
    ended: MeasurementEnd | None = None  # the last one; None: none since the engine started
    found: tuple[Quality, ...] = ()  # rows of the measurement that runs or ran last, as they come
    # The reason why KV on a GPU is packed by the host, which is slower; "" if it is not, or if
    # there is no GPU.
    why_host: str = ""
    # The bound that lossy codecs have to keep here (see engines.calibration.gate.rules); None: not
    # reported.
    max_kl: float | None = None


class RequestProgress(msgspec.Struct, frozen=True):
    """The progress of one request in the engine, in tokens of its prompt and of its answer."""

    tenant: str
    session: str
    prompt_tokens: int
    prefilled_tokens: int  # of the prompt, reused ones included
    answered_tokens: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of an engine at one moment. All counters only grow.

    The counters of the store are those of ``kvstore.stats.StoreStats``, but misses are counted per
    turn. The engine's own are ``prompts``, ``prompt_tokens``, ``cached_tokens``,
    ``source.<where the KV came from>``, ``misses.<reason>``, ``turns``, ``failed_turns``,
    ``generated_tokens``; ``sent_back``: rows that had to make room in memory, and wait (mlx);
    ``keep_failures``: sessions whose KV could not be kept after a turn, or not be given to the
    store; ``rebuild_failures`` (mlx) and ``loads_failed`` (vLLM): restored KV that could not be
    used and was computed again.
    """

    hot_bytes: int  # measured: idle hot sessions and running requests together
    idle_hot_bytes: int  # of these, what dropping idle sessions would free
    hot_capacity_bytes: int
    active_bytes: int  # all that the tensor library holds, weights included
    num_running: int
    num_waiting: int
    save_queue_bytes: int
    tiers: list[TierStats]
    counters: dict[str, int]
    codec: CodecReport | None = None  # None: not reported
    requests: list[RequestProgress] = []  # those inside the engine, as far as it knows
    repacking: Repacking = Repacking()  # of blobs that were stored with an earlier codec
    differs: tuple[str, ...] = ()  # from the data on its Redis; see ``kvstore.likeness``


# ---- gateway -> engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of every connection; shows the token."""

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
    """Protect the session from being demoted or evicted."""

    session: SessionRef


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Undo ``Pin``."""

    session: SessionRef


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Remove the session from every tier, for good."""

    session: SessionRef


class ListSessions(msgspec.Struct, frozen=True, tag="sessions"):
    """Ask for one page of sessions, in the order of (tenant, id), those after ``after``."""

    after: tuple[str, str] | None = None  # tenant and id; None = from the start


class GetStats(msgspec.Struct, frozen=True, tag="stats"):
    """Ask for an ``EngineReport``."""


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Choose the codec again by the measurements of this model, and pack with it from now on.

    Stored blobs stay readable, in any codec.
    """


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Measure the model now, even if it was measured before; see ``Welcome.can_measure``."""

    order: CalibrationOrder | None = None  # None: a quick one, as at a model's first start


class LimitTenants(msgspec.Struct, frozen=True, tag="limit_tenants"):
    """Hold tenants to bytes of the tiers from now on; a tier that is not named has no limits."""

    tiers: dict[TierName, TenantLimits]


Verb: TypeAlias = (Hello | Demote | Prefetch | Pin | Unpin | Forget | ListSessions | GetStats) | (
    Adopt | Measure | LimitTenants
)


# ---- engine -> gateway


class TemplateRules(msgspec.Struct, frozen=True):
    """The forms of conversation that the model's chat template accepts, found by rendering some."""

    inline_system: bool = True  # system messages after the first
    repeated_users: bool = True  # two messages of the user in a row
    # The template argument that keeps the reasoning of earlier turns; {}: it has none, or always
    # keeps it.
    reasoning_switch: dict[str, bool] = {}


class FillIn(msgspec.Struct, frozen=True):
    """The marks of a fill-in-the-middle prompt: the model writes the text between two others."""

    before: str  # stands before the prefix
    between: str  # between prefix and suffix
    after: str  # after the suffix; the model goes on from here

    def prompt(self, prefix: str, suffix: str) -> str:
        """Write the prompt that asks for the text between ``prefix`` and ``suffix``."""
        return f"{self.before}{prefix}{self.between}{suffix}{self.after}"


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """The answer to ``Hello``: the engine describes itself."""

    engine: str  # "mlx", "vllm", "fake"
    engine_version: str
    model: str  # served name
    max_context: int
    codec: CodecReport
    hibernation: bool
    hibernation_reason: str = ""  # why not, in one sentence
    template: TemplateRules = TemplateRules()
    can_measure: bool = False  # it obeys ``Measure``
    live_kv: KVSize | None = None  # as this engine keeps it; None: not reported
    # With two bytes for each value of K and V, in every dtype of the engine, and recurrent states
    # as they are: what packed bytes are compared with.
    bf16_kv: KVSize | None = None
    sees_images: bool = False  # in chats, as ``image_url`` parts
    fill_in: FillIn | None = None  # None: the model was not trained for it
    version: int = WIRE_VERSION


# Why a demote left a session as it was.
KeptReason: TypeAlias = Literal[
    "busy",  # a turn of it is being served
    "pinned",
    "saving",  # its cold copy is on its way
    "no-cold-copy",  # it could not be saved, so it would be lost
    "disabled",  # the engine serves without hibernation
    "no-room",  # the tier did not take all of it
]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer to a verb about one session.

    ``report`` is None if the session is unknown; ``kept`` is the reason if a demote did nothing.
    """

    report: SessionReport | None
    kept: KeptReason | None = None


class Sessions(msgspec.Struct, frozen=True, tag="session_list"):
    """The answer to ``ListSessions``."""

    sessions: list[SessionReport]
    more: bool = False  # True: ask again, with the last of these as ``after``


class Stats(msgspec.Struct, frozen=True, tag="engine_stats"):
    """The answer to ``GetStats``."""

    report: EngineReport


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The answer to ``Adopt`` and ``Measure``: the codec that follows."""

    codec: CodecReport


class TenantUses(msgspec.Struct, frozen=True, tag="tenant_uses"):
    """The answer to ``LimitTenants``: the bytes of each tenant with a limit, by tier and tenant."""

    tiers: dict[TierName, dict[str, int]]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The answer to any verb that failed or is not allowed."""

    message: str


VerbAnswer: TypeAlias = Welcome | Done | Sessions | Stats | Adopted | TenantUses | Refused


class ControlRequest(msgspec.Struct, frozen=True, tag="request"):
    """A verb with the number that its reply will carry."""

    number: int
    verb: Verb


class ControlReply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to the request of the same number."""

    number: int
    answer: VerbAnswer


# The reason of a notice after which the gateway asks for all sessions.
ALL_CHANGED: Final = "found"


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """A session changed: saved, evicted, moved, packed again, or by a verb of another gateway."""

    cause: Literal["saved", "dropped", "moved", "restored", "lost", "turn"]
    session: SessionReport
    why: str = ""  # of "moved" and "lost": "budget", "limit", ``ALL_CHANGED``, ...; "" = unknown


FromEngine: TypeAlias = ControlReply | Notice

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(ControlRequest)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class WireError(Exception):
    """The peer does not speak this protocol; the connection is of no further use."""


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length in front. Raises ``WireError`` if it is too long."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


async def read_request(reader: asyncio.StreamReader) -> ControlRequest:
    """Read one request.

    Raises:
        WireError: the frame is broken or too long.
        asyncio.IncompleteReadError: the connection ended.
    """
    return _decode(_request_decoder, await read_body(reader))


async def read_from_engine(reader: asyncio.StreamReader) -> FromEngine:
    """Read one reply or notice. Raises as ``read_request`` does."""
    return _decode(_from_engine_decoder, await read_body(reader))


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """Read the body of one frame. Raises as ``read_request`` does."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes is over {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)


T = TypeVar("T")


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a control message: {error}") from error
