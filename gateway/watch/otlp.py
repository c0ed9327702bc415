"""Sends a span for each turn to an OpenTelemetry collector; needs the extra ``otlp``.

Only ``launch`` imports this, and only if ``gateway.otlp_endpoint`` is set. Spans have
OpenTelemetry's attributes for generative AI, and never the text of a chat.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.watch.requests import LiveRequest
from gateway.watch.telemetry import Tracing, TurnTrace

CLOSE_MS = 3000
SEND_S = 3.0  # for all tries together; the server waits for it at its end
_context = TraceContextTextMapPropagator()


class OtlpTracing(Tracing):
    """Makes spans of turns, which a thread of the library sends, or drops if it is too slow."""

    def __init__(self, endpoint: str, version: str, exporter: SpanExporter | None = None) -> None:
        """
        Args:
            endpoint: the collector's URL for traces, such as http://localhost:4318/v1/traces.
            exporter: replaces the exporter to ``endpoint``, for tests.
        """
        resource = Resource.create({"service.name": "thermocline", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("thermocline", version)  # type: ignore[assignment]

    def begin(self, name: str, context: Mapping[str, str]) -> TurnTrace:
        parent = _context.extract(context)
        return _TurnSpan(self._tracer.start_span(name, parent, SpanKind.SERVER))  # type: ignore[arg-type]

    def close(self) -> None:
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


class _TurnSpan(TurnTrace):
    def __init__(self, span: Span) -> None:
        headers: dict[str, str] = {}
        _context.inject(headers, set_span_in_context(span))
        super().__init__(headers)
        self._span = span

    def end(self, turn: LiveRequest) -> None:
        self._span.set_attributes(attributes(turn))
        if turn.error:
            self._span.set_attribute("error.type", turn.error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def attributes(turn: LiveRequest) -> dict[str, str | int | float]:
    """Return the known facts about a turn, by OpenTelemetry's attribute names."""
    known: dict[str, str | int | float | None] = {
        "gen_ai.operation.name": turn.operation,
        "gen_ai.provider.name": "thermocline",
        "gen_ai.request.model": turn.model,
        "gen_ai.response.model": turn.model,
        "gen_ai.conversation.id": turn.ref.id,
        "gen_ai.response.time_to_first_chunk": turn.first_token_s,
        "thermocline.client": turn.client,
        "thermocline.waited_s": round(turn.waited_s, 6),
    }
    if turn.cache is not None:
        known["thermocline.cache.source"] = turn.cache.source
        known["thermocline.cache.reason"] = turn.cache.reason
    if (usage := turn.usage) is not None and turn.is_counted:
        known |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
            "gen_ai.usage.cache_creation.input_tokens": usage.cache_written,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning,
        }
    return {name: value for name, value in known.items() if value is not None}
