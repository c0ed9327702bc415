"""The gateway's counters, histograms and gauges, for Prometheus.

Figures of requests have OpenTelemetry's names for generative AI servers (``gen_ai.server.*``), all
others begin with ``thermocline_``. Labels never hold ids, keys or anything else that a client
chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engines.headers import CacheOutcome
from engines.wire import CodecReport, EngineReport

log = logging.getLogger("thermocline.sessions")

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.5, 41, 82)
# A label is never what a client chose.
_LEFT_OUT_KINDS = frozenset(
    {"attribution", "beta", "tool", "container"}
    | {"web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"}
    | {"local_shell", "shell", "apply_patch", "mcp", "namespace", "tool_search", "computer"}
    | {"computer_use_preview", "web_search_call", "file_search_call", "image_generation_call"}
    | {"compaction", "mcp_list_tools", "additional_tools"}
)
_OF_BLOCKS = "block_"  # Anthropic's, which are few
_EVERY_TURN = ("turn", "quiet")  # the request's own log line says as much


class PromptDetails(msgspec.Struct, frozen=True):
    """The part of ``Usage`` that says how much of the prompt was not computed."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None  # newly stored; few engines tell


class AnswerDetails(msgspec.Struct, frozen=True):
    """The part of ``Usage`` that says how much of the answer was reasoning."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The counted part of OpenAI's ``usage``."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: AnswerDetails | None = None

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not computed."""
        return (self.prompt_tokens_details or _NO_DETAILS).cached_tokens or 0

    @property
    def cache_written(self) -> int:
        """Tokens of the prompt that were newly stored."""
        return (self.prompt_tokens_details or _NO_DETAILS).cache_write_tokens or 0

    @property
    def reasoning(self) -> int:
        """Tokens of the answer that were reasoning."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details else None) or 0


_NO_DETAILS = PromptDetails()


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one moment, gathered when they are asked for."""

    ready: bool
    num_running: int
    num_waiting: int
    engine: EngineReport | None
    memory_available_bytes: int | None = None  # of the whole machine; None: not watched


class Metrics:
    """The metrics of one app, in a registry of its own; also the scheduler's ``Observer``."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._duration = self._histogram(
            "gen_ai_server_request_duration_seconds",
            "From the request's arrival to the end of the answer.",
            ("gen_ai_operation_name", "error_type"),
        )
        self._first_token = self._histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request's arrival to the first event of a stream.",
            ("gen_ai_operation_name", "cache"),
        )
        self._waited = self._histogram(
            "thermocline_turn_wait_seconds", "Time in the gateway's waiting line.", ()
        )
        self._http = self._counter("thermocline_http_requests", "Answers.", ("route", "status"))
        self._transitions = self._counter(
            "thermocline_session_transitions", "Changes of state.", ("before", "event", "after")
        )
        self._decisions = self._counter(
            "thermocline_decisions", "What the scheduler decided.", ("decision",)
        )
        self._memory = self._counter(
            "thermocline_memory_levels",
            "How often the machine's memory became low, scarce, or enough again.",
            ("level",),
        )
        self._outcomes = self._counter(
            "thermocline_cache_outcomes",
            "Turns by where the reused KV came from, and why not more of it.",
            ("source", "reason"),
        )
        self._tokens = self._counter(
            "thermocline_tokens", "Tokens of prompts and answers.", ("kind",)
        )
        self._left_out = self._counter(
            "thermocline_left_out",
            "Parts of requests that engines have no use for, left out before the prompt.",
            ("kind",),
        )

        self._divergences = self._counter(
            "thermocline_prompt_divergences",
            "Turns whose prompt did not go on where the session's last one ended.",
            ("changed",),
        )

        self._connections = Gauge(
            "thermocline_connections", "Open connections.", registry=self._registry
        )
        self._connection_ends = self._counter(
            "thermocline_connections_ended", "Connections refused or cut.", ("reason",)
        )

    # ---- gateway.edge.connections.ConnectionObserver

    def connections_open(self, number: int) -> None:
        self._connections.set(number)

    def connection_ended(self, reason: str) -> None:
        self._connection_ends(reason).inc()

    # ---- scheduler.observer.Observer

    def transition(self, session_id: str, before: str, event: str, after: str) -> None:
        level = logging.DEBUG if event in _EVERY_TURN else logging.INFO
        log.log(level, "session %s: %s -> %s (%s)", session_id, before, after, event)
        self._transitions(before, event, after).inc()

    def turn_waited(self, seconds: float) -> None:
        self._waited().observe(seconds)

    def decision(self, name: str) -> None:
        self._decisions(name).inc()

    def memory(self, level: str, available_bytes: int) -> None:
        log.log(
            logging.INFO if level == "enough" else logging.WARNING,
            "memory is %s: %.1f GiB of the machine's are available%s",
            level,
            available_bytes / (1 << 30),
            "; no turns are taken" if level == "scarce" else "",
        )
        self._memory(level).inc()

    # ---- requests

    def answered(self, route: str, status: int) -> None:
        """Count an answer. ``route`` is the handler's name, never a path."""
        self._http(route, str(status)).inc()

    def turn_ended(self, operation: str, seconds: float, error: str) -> None:
        """Count a turn and its duration. ``error`` is one of few words, "" for a good end."""
        self._duration(operation, error).observe(seconds)

    def first_token(self, operation: str, seconds: float, cache: CacheOutcome | None) -> None:
        """Count the time to a stream's first event.

        Args:
            cache: None if the engine's header was missing or of no known form.
        """
        self._first_token(operation, _source_and_reason(cache)[0]).observe(seconds)

    def cache_outcome(self, cache: CacheOutcome | None) -> None:
        """Count where a turn's KV came from; None if the engine's header had no known form."""
        self._outcomes(*_source_and_reason(cache)).inc()

    def left_out(self, kinds: Iterable[str]) -> None:
        """Count parts of a request that were left out; kinds that nobody knows as "other"."""
        for kind in kinds:
            known = kind in _LEFT_OUT_KINDS or kind.startswith(_OF_BLOCKS)
            self._left_out(kind if known else "other").inc()

    def diverged(self, part: str) -> None:
        """Count a prompt that left its session's; ``part`` is model, system, tools or messages."""
        self._divergences(part).inc()

    def used(self, usage: Usage) -> None:
        """Count the tokens of one answer."""
        self._tokens("cached").inc(usage.cached)
        self._tokens("prefilled").inc(max(0, usage.prompt_tokens - usage.cached))
        self._tokens("answered").inc(usage.completion_tokens)

    def render(self, gauges: Gauges) -> bytes:
        """Write all metrics in Prometheus' text format."""
        now = CollectorRegistry()
        now.register(_GaugeCollector(gauges))
        return generate_latest(self._registry) + generate_latest(now)

    def _histogram(
        self, name: str, words: str, labels: tuple[str, ...]
    ) -> Callable[..., Histogram]:
        histogram = Histogram(name, words, labels, registry=self._registry, buckets=_SECONDS)
        return cache(histogram.labels) if labels else lambda: histogram

    def _counter(self, name: str, words: str, labels: tuple[str, ...]) -> Callable[..., Counter]:
        """Make a counter, as a function of its label values.

        The lookup is cached: the library's own takes a lock every time.
        """
        return cache(Counter(name, words, labels, registry=self._registry).labels)


class _GaugeCollector:
    """Shows ``Gauges`` to prometheus_client as a collector."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        gauges = self._gauges
        yield _gauge("engine_ready", "1 while the engine serves.", gauges.ready)
        yield _gauge("turns_running", "Turns inside the engine.", gauges.num_running)
        yield _gauge("turns_waiting", "Turns in the waiting line.", gauges.num_waiting)
        if gauges.memory_available_bytes is not None:
            words = "Memory that the whole machine has left."
            yield _gauge("memory_available_bytes", words, gauges.memory_available_bytes)
        if gauges.engine is not None:
            yield from _engine_metrics(gauges.engine)


def _engine_metrics(report: EngineReport) -> Iterator[Metric]:
    yield _gauge("engine_hot_bytes", "Live KV.", report.hot_bytes)
    yield _gauge("engine_hot_capacity_bytes", "Budget of live KV.", report.hot_capacity_bytes)
    yield _gauge("engine_idle_hot_bytes", "Live KV of idle sessions.", report.idle_hot_bytes)
    if report.active_bytes:  # vLLM's is in processes that are not asked
        yield _gauge("engine_active_bytes", "Tensor memory, weights too.", report.active_bytes)
    yield _gauge("engine_running", "Requests being served.", report.num_running)
    yield _gauge("engine_waiting", "Requests in the engine's own line.", report.num_waiting)
    yield _gauge(
        "engine_save_queue_bytes", "Hot KV that waits to be saved.", report.save_queue_bytes
    )
    events = CounterMetricFamily(
        "thermocline_engine_events", "The engine's counters.", labels=["event"]
    )
    for name, count in report.counters.items():
        events.add_metric([name], count)
    yield events
    yield from _tier_metrics(report)
    if report.codec is not None:
        yield from _codec_metrics(report.codec)


def _codec_metrics(codec: CodecReport) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "thermocline_codec_info", "1 for the codec of each tier.", labels=["tier", "codec"]
    )
    for tier, id in codec.tiers.items():
        info.add_metric([tier, id], 1)
    yield info
    yield _gauge("codec_unmeasured", "1 while nothing was measured to choose by.", codec.unmeasured)
    yield _gauge("codec_measuring", "1 while the model is being measured.", bool(codec.progress))
    for field, words in (
        ("kl", "Measured on this model: KL of the next token, nats."),
        ("top1", "Measured: share of positions with the same most likely token."),
        ("bits_per_element", "Measured: bits for each value, everything counted."),
        ("chain_kl", "Measured: KL at the answers to reasoning chains, nats."),
        ("restore_share", "Measured: time to unpack, as a share of a prefill."),
    ):
        gauge = GaugeMetricFamily(f"thermocline_codec_{field}", words, labels=["codec", "context"])
        for row in codec.rows:
            figure: float | None = getattr(row, field)
            if figure is not None:  # None: an earlier release measured, or nothing was timed
                gauge.add_metric([row.codec_id, str(row.context)], float(figure))
        yield gauge


def _tier_metrics(report: EngineReport) -> Iterator[Metric]:
    for field, words in (
        ("nbytes", "Bytes held."),
        ("capacity_bytes", "Bytes that may be held."),
        ("num_blobs", "Blobs held."),
        ("evictions", "Blobs evicted."),
        ("errors", "Failed operations."),
        ("available", "1 while the tier answers."),
    ):
        name = f"thermocline_tier_{field.replace('nbytes', 'bytes')}"
        gauge = GaugeMetricFamily(name, words, labels=["tier"])
        for tier in report.tiers:
            gauge.add_metric([tier.name], float(getattr(tier, field)))
        yield gauge


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"thermocline_{name}", words, value=float(value))


def _source_and_reason(cache: CacheOutcome | None) -> tuple[str, str]:
    """Return two labels; ``CacheOutcome`` has let only plain words through."""
    return (cache.source, cache.reason or "") if cache else ("unknown", "")
