"""The gateway's counters, histograms and gauges, for Prometheus.

Figures of requests have OpenTelemetry's names for generative AI servers (``gen_ai.server.*``), all
others begin with ``thermocline_``. Labels never hold ids, keys or anything else that a client
chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engines.wire import SessionRef
from gateway.watch.gauges import GaugeCollector, Gauges
from gateway.watch.requests import LiveRequest, Usage
from scheduler.session import Observer, Step

log = logging.getLogger("thermocline.sessions")

# The buckets that OpenTelemetry specifies.
_DURATION_S = tuple(0.01 * 2**i for i in range(14))
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**i for i in range(14))
PROVIDER = "thermocline"
_GEN_AI = "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model"
# The known kinds; any other is counted as "other", since no label may be chosen by a client.
_LEFT_OUT_KINDS = frozenset(
    {"attribution", "beta", "tool", "container"}
    | {"web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"}
    | {"local_shell", "shell", "apply_patch", "mcp", "namespace", "tool_search", "computer"}
    | {"computer_use_preview", "web_search_call", "file_search_call", "image_generation_call"}
    | {"compaction", "mcp_list_tools", "additional_tools", "result_image", "result_file"}
    | {"answer_image", "answer_file"}
)
_OF_BLOCKS = "block_"  # the prefix of Anthropic's kinds, which are few
_EVERY_TURN = ("turn", "quiet")  # logged at debug level: the request has its own line


class Defined(NamedTuple):
    """The definition of a metric, and its description in ``docs/metrics.md``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    words: str
    buckets: tuple[float, ...] = ()  # for a histogram


def _histogram(name: str, labels: str, words: str, buckets: tuple[float, ...]) -> Defined:
    return Defined(name, "histogram", tuple(labels.split()), words, buckets)


def _counter(name: str, labels: str, words: str) -> Defined:
    return Defined(f"thermocline_{name}_total", "counter", tuple(labels.split()), words)


def _gauge(name: str, labels: str, words: str) -> Defined:
    return Defined(f"thermocline_{name}", "gauge", tuple(labels.split()), words)


_DURATION: Final = "gen_ai_server_request_duration_seconds"
_FIRST: Final = "gen_ai_server_time_to_first_token_seconds"
_EACH: Final = "gen_ai_server_time_per_output_token_seconds"
_USAGE: Final = "gen_ai_client_token_usage"
_WAIT: Final = "thermocline_turn_wait_seconds"
DEFINED: Final = (
    _histogram(
        _DURATION,
        f"{_GEN_AI} error_type",
        "From the request's arrival to the end of the answer.",
        _DURATION_S,
    ),
    _histogram(
        _FIRST,
        f"{_GEN_AI} cache",
        "From the request's arrival to the first token of a stream. `cache`: where its prompt's KV"
        " came from; `first` for a session's first turn.",
        _FIRST_TOKEN_S,
    ),
    _histogram(
        _EACH,
        _GEN_AI,
        "Time for each token of a stream after its first token.",
        _TOKEN_S,
    ),
    _histogram(
        _USAGE,
        f"{_GEN_AI} gen_ai_token_type gen_ai_token_cache",
        "Tokens of a turn. `gen_ai_token_cache`: of the prompt, those reused, newly stored, and"
        " neither.",
        _TOKENS,
    ),
    _histogram(_WAIT, "", "Time in the gateway's waiting line.", _DURATION_S),
    _counter(
        "saved_prefill_seconds",
        "source",
        "Seconds of prefill that reused KV has saved, estimated by the measured prefill speed.",
    ),
    _counter("http_requests", "route status", "Answered requests."),
    _counter("session_transitions", "before event after", "Changes of sessions' states."),
    _counter(
        "session_departures",
        "place why",
        "Times that a session's KV left a place (hot, or a tier), by reason.",
    ),
    _counter("decisions", "decision", "Decisions of the scheduler."),
    _counter(
        "memory_levels",
        "level",
        "How often the machine's memory became low, scarce, or enough again.",
    ),
    _counter(
        "cache_outcomes",
        "source reason",
        "Turns by the source of the reused KV, and by the reason why no more was reused.",
    ),
    _counter("tokens", "kind", "Tokens of prompts and answers."),
    _counter("model_loads", "model outcome", "Loads of models on demand, and failures to load."),
    _counter("model_load_seconds", "model", "Time that loading models took."),
    _counter(
        "left_out",
        "kind",
        "Parts of requests that were left out because the engine cannot use them.",
    ),
    _counter(
        "prompt_divergences",
        "changed",
        "Turns whose prompt did not continue the session's previous one.",
    ),
    _gauge("connections", "", "Open connections."),
    _gauge(
        "limits_shared",
        "",
        "1 while limits of keys are counted over all gateways of a Redis; 0: by this one alone.",
    ),
    _gauge(
        "tenants_full", "tier", "Tenants that hold at least nine tenths of their limit of bytes."
    ),
    _counter("connections_ended", "reason", "Connections refused or cut."),
)


class Metrics(Observer):
    """The metrics of one app, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._of = {x.name: _kept(x, self._registry) for x in DEFINED}

    def _add(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter; ``thermocline_`` and ``_total`` are left out of its name."""
        self._of[f"thermocline_{name}_total"](*labels).inc(by)

    # ---- gateway.edge.connections.ConnectionObserver

    def connections_open(self, number: int) -> None:
        self._of["thermocline_connections"]().set(number)

    def connection_ended(self, reason: str) -> None:
        self._add("connections_ended", reason)

    def limits_shared(self, is_shared: bool) -> None:
        """Note whether limits of keys are counted together with other gateways."""
        self._of["thermocline_limits_shared"]().set(is_shared)

    def tenants_full(self, tier: str, number: int) -> None:
        """Note how many tenants hold nearly as much of a tier as their limit allows."""
        self._of["thermocline_tenants_full"](tier).set(number)

    # ---- reports of the scheduler

    def transition(self, ref: SessionRef, step: Step) -> None:
        level = logging.DEBUG if step.event in _EVERY_TURN else logging.INFO
        words = "session %s: %s -> %s (%s)"
        event = f"{step.event}, {step.why}" if step.why else step.event
        log.log(level, words, ref.id, step.before, step.after, event, extra={"session": ref.id})
        self._add("session_transitions", step.before, step.event, step.after)
        if step.left:
            self._add("session_departures", step.left, step.why)

    def turn_waited(self, seconds: float) -> None:
        self._of[_WAIT]().observe(seconds)

    def decision(self, name: str) -> None:
        self._add("decisions", name)

    def memory(self, level: str, available_bytes: int) -> None:
        log.log(
            logging.INFO if level == "enough" else logging.WARNING,
            "memory is %s: %.1f GiB of the machine's are available%s",
            level,
            available_bytes / (1 << 30),
            "; no turns are taken" if level == "scarce" else "",
        )
        self._add("memory_levels", level)

    # ---- requests

    def answered(self, route: str, status: int) -> None:
        """Count an answer. ``route`` is the handler's name, never a path."""
        self._add("http_requests", route, str(status))

    def turn_ended(self, turn: LiveRequest, saved_s: float | None) -> None:
        """Count a turn that is over.

        Args:
            saved_s: the seconds of prefill that it saved; None if not known.
        """
        whose = turn.operation, PROVIDER, turn.model
        self._of[_DURATION](*whose, turn.error).observe(turn.age_s)
        if turn.first_token_s is not None:
            self._of[_FIRST](*whose, turn.source or "unknown").observe(turn.first_token_s)
        if turn.token_s is not None:
            self._of[_EACH](*whose).observe(turn.token_s)
        cache = turn.cache
        if turn.named_cache:  # ``CacheOutcome.parse`` accepts only plain words
            source, reason = (cache.source, cache.reason or "") if cache else ("unknown", "")
            self._add("cache_outcomes", source, reason)
        if saved_s and cache is not None:
            self._add("saved_prefill_seconds", cache.source, by=saved_s)
        if turn.diverged:
            self._add("prompt_divergences", turn.diverged)
        if turn.used is not None:
            self.used(turn.operation, turn.model, turn.used)

    def used(self, operation: str, model: str, usage: Usage) -> None:
        """Count the tokens of one answer; ``model``: the served model's name."""
        whose = operation, PROVIDER, model
        cached = min(usage.cached, usage.prompt_tokens)
        stored = min(usage.cache_written, usage.prompt_tokens - cached)
        rest = usage.prompt_tokens - cached - stored
        for kind, cache_use, number in (
            ("input", "read", cached),
            ("input", "creation", stored),
            ("input", "none", rest),
            ("output", "none", usage.completion_tokens),
        ):
            if number:
                self._of[_USAGE](*whose, kind, cache_use).observe(number)
        self._add("tokens", "cached", by=usage.cached)
        self._add("tokens", "prefilled", by=max(0, usage.prompt_tokens - usage.cached))
        self._add("tokens", "answered", by=usage.completion_tokens)

    def left_out(self, kinds: Iterable[str]) -> None:
        """Count parts of a request that were left out; unknown kinds as "other"."""
        for kind in kinds:
            known = kind in _LEFT_OUT_KINDS or kind.startswith(_OF_BLOCKS)
            self._add("left_out", kind if known else "other")

    def loaded(self, model: str, seconds: float, is_loaded: bool) -> None:
        """Count a load of a model, or its failure; ``model``: its name in the settings."""
        self._add("model_loads", model, "loaded" if is_loaded else "failed")
        self._add("model_load_seconds", model, by=seconds)

    def render(self, *gauges: Gauges) -> bytes:
        """Return all metrics in the text format of Prometheus; ``gauges``: those of each model."""
        now = CollectorRegistry()
        now.register(GaugeCollector(*gauges))
        return generate_latest(self._registry) + generate_latest(now)


def _kept(defined: Defined, registry: CollectorRegistry) -> Callable[..., Any]:
    """Create a metric; return a function from its label values to the counter of them.

    The function caches its results, since the library's lookup takes a lock every time.
    """
    name, kind, labels, words, buckets = defined
    if kind == "histogram":
        made: Any = Histogram(name, words, labels, registry=registry, buckets=buckets)
    else:
        made = (Counter if kind == "counter" else Gauge)(name, words, labels, registry=registry)
    return cache(made.labels) if labels else lambda: made
