"""Control messages between the gateway and an engine process, and their framing.

A frame is a four-byte big-endian length and a msgpack body of at most ``MAX_FRAME_BYTES``. The
gateway sends ``ControlRequest``; the engine answers each with one ``ControlReply`` of the same
number, and may send ``Notice`` at any time. KV bytes never travel here.

Every engine implements all verbs; ``Welcome.can_measure`` states whether ``Measure`` is possible.
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
# Bytes of sessions in one reply; small, since decoding a reply blocks the gateway's event loop.
PAGE_BYTES = 4 << 20
BF16_BYTES = 2


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one session in an engine; the defaults mean that the engine holds nothing of it.

    ``hot_bytes`` and ``cold_bytes`` are sizes in bytes, ``idle_s`` seconds since the last turn.
    """

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
    cold_tokens: int = 0  # tokens whose packed KV takes ``cold_bytes``; 0 = not reported


def absent(session: SessionRef) -> SessionReport:
    """Return the report of a session of which the engine holds nothing."""
    return SessionReport(tenant=session.tenant, id=session.id)


class MeasurementEnd(msgspec.Struct, frozen=True):
    """The end of the last measurement of the model since the engine's start."""

    at: float  # seconds since the epoch
    error: str = ""  # the reason if it failed; "" = it succeeded and its figures are reported


class CodecReport(msgspec.Struct, frozen=True, kw_only=True):
    """The codec that packs sessions from now on, and the reason for this choice."""

    name: str  # the preset's name
    id: str = ""  # the codec's id, with the digits of its profile
    why: str = ""  # the reason in words, with the figures
    # The measured cost on this model, one row per context length; empty if exact or not measured.
    rows: tuple[Quality, ...] = ()
    others: tuple[Quality, ...] = ()  # such rows of codecs not in use: refused ones, floors
    # True if the codec of the settings was never measured on this model.
    unmeasured: bool = False
    fingerprint: str = ""  # the model's fingerprint, which names its profile
    # The progress of a measurement, such as "measuring: 3 of 12 cases", or, after the verdict,
    # "measuring more: 5 of 96 texts to learn from"; "" = no measurement runs.
    progress: str = ""
    ended: MeasurementEnd | None = None  # None: no measurement has ended since the engine started
    found: tuple[Quality, ...] = ()  # rows so far of the measurement that runs or ran last
    # The reason why the host, which is slower, packs the KV of a GPU; "" if the GPU packs it or
    # there is no GPU.
    why_host: str = ""
    # The bound that lossy codecs have to keep here, in nats (see engines.calibration.gate.rules);
    # None: not reported.
    max_kl: float | None = None


class RequestProgress(msgspec.Struct, frozen=True):
    """The progress of one request in the engine, in tokens of its prompt and of its answer."""

    tenant: str
    session: str
    prompt_tokens: int
    prefilled_tokens: int  # of the prompt, reused ones included
    answered_tokens: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of an engine at one moment; counters never decrease.

    The counters of the store are those of ``kvstore.stats.StoreStats``, but misses are counted per
    turn. The engine's own are ``prompts``, ``prompt_tokens``, ``cached_tokens``,
    ``source.<where the KV came from>``, ``misses.<reason>``, ``turns``, ``failed_turns`` and
    ``generated_tokens``. ``sent_back`` counts rows that were put back in the queue to free memory
    (mlx); ``keep_failures`` counts sessions whose KV could not be kept hot after a turn or given to
    the store; ``rebuild_failures`` (mlx) and ``loads_failed`` (vLLM) count restores whose KV could
    not be used and was computed again.
    """

    hot_bytes: int  # measured: idle hot sessions and running requests together
    idle_hot_bytes: int  # the part of ``hot_bytes`` that dropping idle sessions would free
    hot_capacity_bytes: int
    active_bytes: int  # all that the tensor library holds, weights included
    num_running: int
    num_waiting: int
    save_queue_bytes: int
    tiers: list[TierStats]
    counters: dict[str, int]
    codec: CodecReport | None = None  # None: not reported
    requests: list[RequestProgress] = []  # requests that the engine is serving or has queued
    repacking: Repacking = Repacking()  # progress with blobs that an earlier codec has packed
    differs: tuple[str, ...] = ()  # settings unlike those of its Redis data: ``kvstore.likeness``


# ---- gateway -> engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of every connection; it carries the bearer token."""

    token: str
    version: int = WIRE_VERSION


class Demote(msgspec.Struct, frozen=True, tag="demote"):
    """Drop the hot copy once a cold copy exists; with ``tier``, also move the cold copy there."""

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
    """Ask for one page of sessions, in the order of (tenant, id), starting after ``after``."""

    after: tuple[str, str] | None = None  # tenant and id; None = from the start


class GetStats(msgspec.Struct, frozen=True, tag="stats"):
    """Ask for an ``EngineReport``."""


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Choose the codec again from the measurements of this model, and use it from now on.

    Stored blobs stay readable, whichever codec packed them.
    """


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Measure the model now, even if it was measured before; see ``Welcome.can_measure``."""

    order: CalibrationOrder | None = None  # None: a quick measurement, as at a model's first start


class LimitTenants(msgspec.Struct, frozen=True, tag="limit_tenants"):
    """Limit tenants to bytes of the tiers from now on; a tier that is not named has no limits."""

    tiers: dict[TierName, TenantLimits]


Verb: TypeAlias = (Hello | Demote | Prefetch | Pin | Unpin | Forget | ListSessions | GetStats) | (
    Adopt | Measure | LimitTenants
)


# ---- engine -> gateway


class TemplateRules(msgspec.Struct, frozen=True):
    """The forms of conversation that the model's chat template accepts.

    ``engines.host.template_rules`` finds them by rendering a few short chats.
    """

    inline_system: bool = True  # system messages after the first
    repeated_users: bool = True  # two messages of the user in a row
    # The template argument that keeps the reasoning of earlier turns; {} = the template has none,
    # or always keeps it.
    reasoning_switch: dict[str, bool] = {}


class FillIn(msgspec.Struct, frozen=True):
    """The control tokens of a fill-in-the-middle prompt: the model writes the text in between."""

    before: str  # the token before the prefix
    between: str  # the token between prefix and suffix
    after: str  # the token after the suffix, from where the model generates

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the prompt that asks for the text between ``prefix`` and ``suffix``."""
        return f"{self.before}{prefix}{self.between}{suffix}{self.after}"


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """The answer to ``Hello``, in which the engine describes itself."""

    engine: str  # "mlx", "vllm", "fake"
    engine_version: str
    model: str  # served name
    max_context: int
    codec: CodecReport
    hibernation: bool
    hibernation_reason: str = ""  # why ``hibernation`` is False, in one sentence
    template: TemplateRules = TemplateRules()
    can_measure: bool = False  # whether ``Measure`` is possible
    live_kv: KVSize | None = None  # size of live KV as this engine keeps it; None: not reported
    # Size of live KV with two bytes for each value of K and V, whatever the engine's dtype, and
    # recurrent states as they are; packed bytes are compared with it.
    bf16_kv: KVSize | None = None
    sees_images: bool = False  # whether chats may hold ``image_url`` parts
    fill_in: FillIn | None = None  # None: the model was not trained for it
    version: int = WIRE_VERSION


# The reason why a demote left a session as it was.
KeptReason: TypeAlias = Literal[
    "busy",  # a turn of the session is being served
    "pinned",
    "saving",  # its cold copy is still being written
    "no-cold-copy",  # it could not be saved, so dropping the hot copy would lose it
    "disabled",  # the engine serves without hibernation
    "no-room",  # the tier did not take all of it
]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer to a verb about one session.

    ``report`` is None if the engine does not know the session; ``kept`` is the reason why a demote
    left it hot, None otherwise.
    """

    report: SessionReport | None
    kept: KeptReason | None = None


class Sessions(msgspec.Struct, frozen=True, tag="session_list"):
    """The answer to ``ListSessions``."""

    sessions: list[SessionReport]
    more: bool = False  # True: more follow; ask again with the last of these as ``after``


class Stats(msgspec.Struct, frozen=True, tag="engine_stats"):
    """The answer to ``GetStats``."""

    report: EngineReport


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The answer to ``Adopt`` and ``Measure``: the codec in use from now on."""

    codec: CodecReport


class TenantUses(msgspec.Struct, frozen=True, tag="tenant_uses"):
    """The answer to ``LimitTenants``: by tier and tenant, the bytes that limited tenants use."""

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


# ``Notice.why`` of a notice after which the gateway asks for all sessions.
ALL_CHANGED: Final = "found"


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """A change of a session: saved, evicted, moved, packed again, or changed by another gateway."""

    cause: Literal["saved", "dropped", "moved", "restored", "lost", "turn"]
    session: SessionReport
    # The reason for "moved" and "lost": "budget", "limit", ``ALL_CHANGED``, ...; "" = unknown.
    why: str = ""


FromEngine: TypeAlias = ControlReply | Notice

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(ControlRequest)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class WireError(Exception):
    """The peer does not speak this protocol; the connection cannot be used any more."""


def frame(message: msgspec.Struct) -> bytes:
    """Return a message encoded, with its length in front. Raises ``WireError`` if too long."""
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
