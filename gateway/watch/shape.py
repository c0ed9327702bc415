"""The shape of the data shown: that of ``GET /v1/snapshot`` and of one session's detail.

``docs/snapshot.md`` says the same in words, with examples. Times are Unix times in seconds, sizes
are bytes, durations seconds; what is not known is null. No field ever holds the text of a chat, but
a session's title where ``gateway.session_titles`` asks for it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from engines.base import TierName
from kvstore.stats import Repacking

Phase: TypeAlias = Literal["waiting", "prefill", "decode"]
MAX_MOVES = 60  # of one tenant, or of all
KVPlace: TypeAlias = Literal["", "hot", TierName]  # of a session's KV; "" = none yet


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and who is looking."""

    model: str | None  # the name that clients use; null while the engine starts
    engine: str | None  # mlx, vllm or fake
    engine_version: str | None
    version: str  # of this server
    started_at: float
    ready: bool
    loading: str  # of a model on demand: unloaded, loading, loaded, unloading; "" of others
    trouble: str  # why it is not ready; "" while it is
    draining: bool
    max_context: int | None
    hibernation: bool | None
    hibernation_reason: str  # why sessions do not sleep; "" if they do
    dialects: tuple[str, ...]
    admin: bool  # the caller sees all tenants, and may act on their sessions
    tenant: str | None  # whose sessions these are; null = all tenants'


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is being served. Its id is also in the answer's ``x-request-id``."""

    id: str
    tenant: str | UnsetType = UNSET  # for admins only
    session: str
    client: str  # a word for the program that asks; "other" for one that is not known
    operation: str  # chat, text_completion, ...
    started_at: float
    phase: Phase
    prompt_tokens: int | None  # None until the engine reports it
    prefilled_tokens: int | None  # reused ones included
    answered_tokens: int | None
    source: str | None  # where the reused part of the prompt came from
    reason: str | None  # why not more of it was reused


# Of a turn: its session began; it went on in hot memory, or from a tier; nothing was found.
TurnKind: TypeAlias = Literal["first", "hot", "restored", "missed"]


class FirstTokenTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The time from a request's arrival to its first token, over the latest streams of a kind."""

    turns: int
    p50_s: float
    p95_s: float
    prompt_tokens: int  # the median


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """This moment, as far as the caller may see it."""

    running: int
    waiting: int
    requests: list[RequestStatus]  # the oldest first, at most ``MAX_REQUESTS``
    # Over the last ten seconds, or since there is work again: prompts' computed ones, and answers'.
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    memory_available_bytes: int | None  # of the whole machine; for admins only
    prefill_tokens_per_s: float | None  # measured; savings are estimated by it
    saved_tokens_today: int  # restored or hot, since midnight UTC or the start
    saved_s_today: float | None  # null: the speed of prefill is not known yet
    turns_today: int
    first_token: dict[TurnKind, FirstTokenTimes]  # kinds that were seen, since the server's start


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts what one tenant has and uses."""

    name: str
    sessions: int
    hot_bytes: int
    cold_bytes: int
    running: int  # requests inside the engine
    waiting: int  # and in the gateway's line
    tokens_last_hour: int  # that were computed, of prompts and answers
    share: float | None  # of those of all tenants; null while there are none
    wait_p95_s: float | None  # in the gateway's line, over its latest turns
    saved_tokens_today: int


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table of sessions."""

    id: str
    tenant: str | UnsetType = UNSET  # for admins only
    title: str | UnsetType = UNSET  # the user's first words, where the settings ask for them
    client: str | None  # of its latest turn
    parent: str | None
    kind: Literal["main", "child", "task"]
    state: str  # active, idle, saving, hibernating, cold, waking or away
    tier: TierName | None  # the fastest that holds a cold copy
    tokens: int  # while it is served: those of the prompt and of the answer so far
    bytes: int | None  # hot bytes while hot (about, while it is served), packed bytes while cold
    cold_bytes: int
    bf16_bytes: int | None  # that the KV of its tokens would take in bf16
    ratio: float | None  # its bytes in bf16 over its packed bytes; null: it is not packed
    idle_since: float | None  # null while it is served
    pinned: bool
    last_source: str | None  # first, hot, cold-ram, cold-disk, cold-redis or miss
    last_reason: str | None  # why not more of its prompt was reused
    saved_tokens: int  # of its prompts, not computed again
    saved_s: float | None  # estimated, that these would have taken; null: not known
    turns: int  # that this server has seen, with the one that it serves
    retain_until: float | None  # its client asked to keep it until then


class HotMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Live KV against its budget."""

    bytes: int
    idle_bytes: int  # of these, what idle sessions would give back by sleeping
    capacity_bytes: int | None
    high_water: float  # shares of the capacity between which idle sessions are put to sleep
    low_water: float
    save_queue_bytes: int | None
    measuring_bytes: int  # of these, about, while the model is measured


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of the cold store. A tenant sees its own bytes only."""

    name: TierName
    bytes: int
    profile_bytes: int  # of these, the learned tables of codecs
    sessions: int  # asleep (cold), their fastest copy here
    hot_sessions: int  # awake, with a copy ready here
    capacity_bytes: int | None
    blobs: int | None
    evictions: int | None  # since the engine's start
    errors: int | None
    available: bool
    codec: str | None


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The places of the sessions' KV, against their budgets."""

    hot: HotMemory
    tiers: list[TierStatus]  # fastest first
    cold_bytes: int  # packed bytes of all sessions, each counted once
    bf16_bytes: int | None  # that the same KV would take in bf16
    sessions: dict[str, int]  # how many are in each state
    outcomes: dict[str, dict[str, int]]  # turns by source, then by reason ("" = nothing missed)
    departures: dict[str, dict[str, int]]  # sessions that left a place, hot or a tier, by why
    repacking: Repacking | None  # for admins only


class QualityRow(msgspec.Struct, frozen=True, kw_only=True):
    """The measured cost of one codec on this model, at one length of context."""

    preset: str
    codec_id: str
    context: int
    in_use: bool
    bits_per_element: float
    kl: float
    top1: float
    perplexity_change_pct: float
    delta_p: float | None
    needle_found: int
    needle_total: int
    chain_kl: float | None
    chain_top1: float | None
    chain_delta_p: float | None
    restore_share: float | None  # time to unpack, in prefills of the same tokens
    prefill_s: float | None  # of 1,000 tokens
    restore_s: float | None


class QualityBound(msgspec.Struct, frozen=True):
    """The most that a codec may cost to serve this model."""

    kl: float
    top1: float
    chain_kl: float
    chain_top1: float


class CodecVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict of the gate, from then on until the next."""

    at: float  # when this server learned it
    codec: str  # id
    why: str
    measured: bool
    worst_kl: float | None  # of those in use that lose something


class QualityStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The gate: the codecs in use, and their measured cost."""

    name: str
    codec: str  # id; "" = the engine reports none
    exact: bool  # what is stored is as it was computed
    expected: str  # the size that a measurement will lead to, in words; "" = none is awaited
    why: str
    measured: bool  # false: what the settings ask for was never measured on this model
    progress: str  # of a measurement; "" = none runs
    can_measure: bool  # ``POST /admin/measure`` starts one
    bound: QualityBound | None
    rows: list[QualityRow]
    history: list[CodecVerdict]  # since this server's start, the oldest first


class HourlySpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds of the last hour, or since the server's start; means over each step."""

    since: float  # when the first step began
    step_s: int
    prompt_tokens_per_s: list[float]  # the oldest first
    answer_tokens_per_s: list[float]


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A session's KV is in another place than before."""

    number: int  # of all moves since the server's start
    at: float
    id: str
    tenant: str | UnsetType = UNSET  # for admins only
    before: KVPlace  # "" = it began
    after: KVPlace
    event: str  # of ``Transition``
    why: str
    tokens: int
    bytes: int | None  # that it takes there
    bf16_bytes: int | None  # that its tokens would take in bf16


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a reader may see, at one moment."""

    server: ServerStatus
    now: Activity
    memory: MemoryStatus
    quality: QualityStatus | None  # null while the engine starts
    hour: HourlySpeeds
    moves: list[Move]  # of the last hour, the oldest first; the latest ``MAX_MOVES``
    tenants: list[TenantStatus]  # for admins only; who used most in the last hour first
    num_sessions: int  # may be more than are listed
    sessions: list[SessionStatus]  # the most recently used first


class Transition(msgspec.Struct, frozen=True):
    """A step of a session's life."""

    at: float
    before: str
    event: str
    after: str
    tier: TierName | None  # that held its cold copy then
    why: str  # its KV left the place where it was; "" if it did not


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One turn that is over: where its prompt came from, and how long it took."""

    at: float  # when the request came
    client: str
    operation: str
    source: str | None
    reason: str | None  # why not more was reused
    prompt_tokens: int | None  # null: the answer had no usage
    reused_tokens: int  # of these, ``restored_tokens`` came from a tier
    restored_tokens: int
    computed_tokens: int | None
    answered_tokens: int | None
    waited_s: float  # in the gateway's line
    first_token_s: float | None  # of a stream, from the request's arrival
    total_s: float
    saved_s: float | None  # estimated
    changed: str | None  # what left the prompt before: model, system, tools or messages
    at_message: int | None  # the first message that differs, where it was the messages
    error: str  # "" for a good end


class SessionDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One session with its past, for ``GET /v1/sessions/{id}``."""

    row: SessionStatus
    timeline: list[Transition]  # the oldest first
    last_turns: list[TurnRecord]
