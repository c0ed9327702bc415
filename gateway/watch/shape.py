"""The data of ``GET /v1/snapshot`` and of ``GET /v1/sessions/{id}``.

``docs/snapshot.md`` describes the fields with examples. Times are Unix times in seconds, sizes are
bytes, durations seconds; what is not known is null. No field holds the text of a chat, except a
session's title if ``gateway.session_titles`` is set.
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
    """The server, and the reader's rights."""

    model: str | None  # the name that clients use; null while the engine starts
    engine: str | None  # mlx, vllm or fake
    engine_version: str | None
    version: str  # of this server
    started_at: float
    ready: bool
    loading: str  # a model on demand: unloaded, loading, loaded or unloading; "" for others
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
    client: str  # the client program's name; "other" if it is not known
    operation: str  # chat, text_completion, ...
    started_at: float
    phase: Phase
    prompt_tokens: int | None  # None until the engine reports it
    prefilled_tokens: int | None  # including reused ones
    answered_tokens: int | None
    source: str | None  # where the reused part of the prompt came from
    reason: str | None  # why not more of it was reused


# A turn that began its session, found its KV in hot memory, in a tier, or nowhere.
TurnKind: TypeAlias = Literal["first", "hot", "restored", "missed"]


class FirstTokenTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The time from a request's arrival to its first token, over the latest streams of a kind."""

    turns: int
    p50_s: float
    p95_s: float
    prompt_tokens: int  # the median


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """The present activity, as far as the caller may see it."""

    running: int
    waiting: int
    requests: list[RequestStatus]  # the oldest first, at most ``MAX_REQUESTS``
    # Computed tokens of prompts, and tokens of answers, over the last ten seconds, or since work
    # began after a pause.
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    memory_available_bytes: int | None  # of the whole machine; for admins only
    prefill_tokens_per_s: float | None  # measured; savings are estimated by it
    saved_tokens_today: int  # restored or found hot, since midnight UTC or the start
    saved_s_today: float | None  # null: the speed of prefill is not known yet
    turns_today: int
    first_token: dict[TurnKind, FirstTokenTimes]  # since the server's start, kinds with any turn


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one tenant."""

    name: str
    sessions: int
    hot_bytes: int
    cold_bytes: int
    running: int  # requests inside the engine
    waiting: int  # requests in the gateway's line
    tokens_last_hour: int  # computed tokens of prompts, and tokens of answers
    share: float | None  # of these tokens of all tenants; null if there are none
    wait_p95_s: float | None  # in the gateway's line, over its latest turns
    saved_tokens_today: int


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table of sessions."""

    id: str
    tenant: str | UnsetType = UNSET  # for admins only
    title: str | UnsetType = UNSET  # the user's first words, if ``gateway.session_titles``
    client: str | None  # of its latest turn
    parent: str | None
    kind: Literal["main", "child", "task"]
    state: str  # active, idle, saving, hibernating, cold, waking or away
    tier: TierName | None  # the fastest that holds a cold copy
    tokens: int  # while it is served: of the prompt and the answer so far
    bytes: int | None  # live KV while hot (estimated during a turn), packed bytes while cold
    cold_bytes: int
    bf16_bytes: int | None  # that the KV of its tokens would take in bf16
    ratio: float | None  # its bytes in bf16 over its packed bytes; null: it is not packed
    idle_since: float | None  # null while it is served
    pinned: bool
    last_source: str | None  # first, hot, cold-ram, cold-disk, cold-redis or miss
    last_reason: str | None  # why not more of its prompt was reused
    saved_tokens: int  # reused tokens of all its prompts
    saved_s: float | None  # estimated time of prefill that these have saved; null: not known
    turns: int  # that this server has seen, including a running one
    retain_until: float | None  # its client asked to keep it until then


class HotMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Live KV against its budget."""

    bytes: int
    idle_bytes: int  # of these, the bytes that would become free if idle sessions slept
    capacity_bytes: int | None
    high_water: float  # shares of the capacity between which idle sessions are put to sleep
    low_water: float
    save_queue_bytes: int | None
    measuring_bytes: int  # of these, an estimate of what a running measurement holds


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of the cold store. A tenant sees its own bytes only."""

    name: TierName
    bytes: int
    profile_bytes: int  # of these, the learned tables of codecs
    sessions: int  # cold sessions whose fastest copy is here
    hot_sessions: int  # other sessions whose fastest copy is here
    capacity_bytes: int | None
    blobs: int | None
    evictions: int | None  # since the engine's start
    errors: int | None
    available: bool
    codec: str | None


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of the sessions' KV in each place, against the budgets."""

    hot: HotMemory
    tiers: list[TierStatus]  # fastest first
    cold_bytes: int  # packed bytes of all sessions, each counted once
    bf16_bytes: int | None  # that the same KV would take in bf16
    sessions: dict[str, int]  # how many are in each state
    outcomes: dict[str, dict[str, int]]  # turns by source, then by reason ("" = all was reused)
    departures: dict[str, dict[str, int]]  # sessions whose KV left a place, by place and reason
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
    restore_share: float | None  # time to unpack, as a share of a prefill of the same tokens
    prefill_s: float | None  # of 1,000 tokens
    restore_s: float | None


class QualityBound(msgspec.Struct, frozen=True):
    """The bound on a codec's measured loss, within which it may be used for this model."""

    kl: float
    top1: float
    chain_kl: float
    chain_top1: float


class CodecVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict of the gate, valid until the next one."""

    at: float  # when this server received it
    codec: str  # id
    why: str
    measured: bool
    worst_kl: float | None  # the largest of the codec's rows; null: none was measured


class QualityStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The gate: the codecs in use, and their measured cost."""

    name: str
    codec: str  # id; "" = the engine reports none
    exact: bool  # what is stored is as it was computed
    expected: str  # in words, the size that the running first measurement may give; "" = none runs
    why: str
    measured: bool  # false: the codec was not measured on this model
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
    """A move of a session's KV from one place to another."""

    number: int  # counts all moves since the server's start
    at: float
    id: str
    tenant: str | UnsetType = UNSET  # for admins only
    before: KVPlace  # "" = it began
    after: KVPlace
    event: str  # of ``Transition``
    why: str
    tokens: int
    bytes: int | None  # its size in the new place
    bf16_bytes: int | None  # that its tokens would take in bf16


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of the server, as far as the reader may see it."""

    server: ServerStatus
    now: Activity
    memory: MemoryStatus
    quality: QualityStatus | None  # null while the engine starts
    hour: HourlySpeeds
    moves: list[Move]  # of the last hour, the oldest first; the latest ``MAX_MOVES``
    tenants: list[TenantStatus]  # for admins only; by use in the last hour, the most first
    num_sessions: int  # may be more than are listed
    sessions: list[SessionStatus]  # the most recently used first


class Transition(msgspec.Struct, frozen=True):
    """A change of a session's state."""

    at: float
    before: str
    event: str
    after: str
    tier: TierName | None  # that held its cold copy then
    why: str  # the reason why its KV left its place; "" if it did not


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One turn that is over: the source of its prompt's KV, its tokens and its times."""

    at: float  # when the request came
    client: str
    operation: str
    source: str | None
    reason: str | None  # why not more was reused
    prompt_tokens: int | None  # null: the engine sent no counts
    reused_tokens: int  # of which ``restored_tokens`` came from a tier
    restored_tokens: int
    computed_tokens: int | None
    answered_tokens: int | None
    waited_s: float  # in the gateway's line
    first_token_s: float | None  # of a stream, from the request's arrival
    total_s: float
    saved_s: float | None  # estimated
    changed: str | None  # the first changed part: model, system, tools or messages; null: none
    at_message: int | None  # the first message that differs, if ``changed`` is messages
    error: str  # "" if it succeeded


class SessionDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One session with its history, for ``GET /v1/sessions/{id}``."""

    row: SessionStatus
    timeline: list[Transition]  # the oldest first
    last_turns: list[TurnRecord]
