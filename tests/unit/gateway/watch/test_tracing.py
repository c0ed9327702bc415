"""Traces: a client's context reaches the engine, and a turn is a span with the known attributes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.watch.otlp import OtlpTracing
from gateway.watch.tracing import context_of
from tests.unit.gateway.in_process import MODEL, Answered, App, RecordingEngine

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def answer() -> Answered:
    usage = {"prompt_tokens": 40, "completion_tokens": 5}
    usage["prompt_tokens_details"] = {"cached_tokens": 30}  # type: ignore[assignment]
    headers = {"content-type": "application/json", "x-thermocline-cache": "cold-ram; tokens=30"}
    return Answered(200, headers, json.dumps({"usage": usage}).encode())


async def chat(app: App, **headers: str) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a secret"}]}
    return await app.post("/v1/chat/completions", {**body, "session_id": "s"}, **headers)


async def test_a_clients_context_goes_on_to_the_engine():
    app = App()
    await chat(app, traceparent=PARENT, tracestate="vendor=1")
    asked = app.engine.asked[-1].headers
    assert (asked["traceparent"], asked["tracestate"]) == (PARENT, "vendor=1")
    await chat(app)
    assert "traceparent" not in app.engine.asked[-1].headers


@pytest.mark.parametrize(
    "parent",
    [
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        PARENT + "\r\nx: y",
        PARENT.upper(),
    ],
)
def test_a_context_that_is_not_well_formed_is_dropped(parent: str):
    assert context_of([(b"traceparent", parent.encode()), (b"tracestate", b"a=b")]) == {}


async def test_a_turn_is_a_span_between_the_clients_and_the_engines():
    app, exporter = App(RecordingEngine(answer())), InMemorySpanExporter()
    app.gateway.tracing = OtlpTracing("", "1", exporter)
    assert (await chat(app, traceparent=PARENT)).status == 200
    app.gateway.tracing.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == f"chat {MODEL}"
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == SPAN
    sent = app.engine.asked[-1].headers["traceparent"]
    assert sent == f"00-{TRACE}-{span.context.span_id:016x}-01"
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.conversation.id"] == "s"
    assert attributes["gen_ai.usage.input_tokens"] == 40
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 30
    assert attributes["thermocline.cache.source"] == "cold-ram"
    assert "secret" not in str(attributes)


async def test_a_turn_that_fails_says_how():
    app, exporter = App(), InMemorySpanExporter()
    app.gateway.tracing = OtlpTracing("", "1", exporter)
    app.engine.answer = Answered(400, {"content-type": "application/json"}, b"{}")
    await chat(app)
    app.gateway.tracing.close()
    (span,) = exporter.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "engine"
    assert not span.status.is_ok
