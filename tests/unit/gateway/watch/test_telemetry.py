"""Lines of the log, the last of them for admins, and traces that go on."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.keys import generate_key
from gateway.watch.otlp import OtlpTracing
from gateway.watch.telemetry import LogRing, OneLine, OneObject, context_of, redacted
from tests.unit.gateway.in_process import MODEL, Answered, App, RecordingEngine, Reply


def record(message, *arguments, exc_info=None):
    return logging.LogRecord(
        "thermocline.gateway", logging.WARNING, "", 0, message, arguments, exc_info
    )


def test_a_line_says_when_how_grave_who_and_what():
    found = record("%s is %d", "x", 3)
    found.created, found.msecs = 0.0, 7.0
    assert OneLine().format(found) == "1970-01-01T00:00:00.007Z warning gateway: x is 3"


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\x1b[31mb", "a\u2028b", "a\u202eb", "a\x85b"])
def test_nothing_in_a_message_breaks_the_line_or_steers_the_terminal(text):
    line = OneLine().format(record("%s", text))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


def test_a_traceback_stays_on_the_line():
    try:
        raise ValueError("no\nway")
    except ValueError:
        line = OneLine().format(record("failed", exc_info=sys.exc_info()))
    assert len(line.splitlines()) == 1
    assert "ValueError: no" in line


def test_a_json_line_has_the_ids_in_fields_of_their_own() -> None:
    found = record("turn of %s", "x\ny")
    found.request_id, found.session = "req_1", "s\n1"
    line = OneObject().format(found)
    assert "\n" not in line
    wanted = {"message": "turn of x\ny", "request_id": "req_1", "session": "s\n1"}
    assert json.loads(line).items() >= wanted.items()
    assert "session" not in json.loads(OneObject().format(record("plain")))


def test_it_keeps_the_last_lines_and_returns_the_new_ones():
    ring = LogRing(max_lines=3)
    for i in range(5):
        ring.handle(record(f"line {i}"))
    assert [x.text for x in ring.lines(0, 10)] == ["line 2", "line 3", "line 4"]
    assert [x.text for x in ring.lines(4, 10)] == ["line 4"]
    assert [x.text for x in ring.lines(0, 1)] == ["line 4"]
    assert ring.lines(5, 10) == []


def test_a_record_that_cannot_be_read_raises_nothing(capsys: pytest.CaptureFixture[str]):
    ring = LogRing()
    ring.handle(record("%d", "x"))
    assert "Logging error" in capsys.readouterr().err
    ring.handle(record("next"))
    assert [x.text for x in ring.lines(0, 10)] == ["next"]


@pytest.mark.parametrize(
    "text",
    [
        "authorization: Bearer SECRET",
        "redis://user:SECRET@host:6379/0",
        "https://api/?api_key=SECRET&x=1",
    ],
)
@pytest.mark.parametrize("secret", [generate_key("t")[0], "hunter2-hunter2"], ids=["key", "word"])
def test_secrets_are_not_kept(text: str, secret: str):
    ring = LogRing()
    ring.handle(record(text.replace("SECRET", secret)))
    assert secret not in ring.lines(0, 1)[0].text


def test_a_bare_key_or_hash_is_not_kept_and_plain_words_are():
    key, line = generate_key("t")
    assert key not in redacted(f"got {key}, it seems")
    assert line.partition(":")[2] not in redacted(line)
    plain = "session task-1: idle -> cold (evicted); 12 MiB at 127.0.0.1:8080"
    assert redacted(plain) == plain


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def answer() -> Answered:
    usage = {"prompt_tokens": 40, "completion_tokens": 5}
    usage["prompt_tokens_details"] = {"cached_tokens": 30}  # type: ignore[assignment]
    headers = {"content-type": "application/json", "x-thermocline-cache": "cold-ram; tokens=30"}
    return Answered(200, headers, json.dumps({"usage": usage}).encode())


async def chat(app: App, **headers: str) -> Reply:
    said = [{"role": "user", "content": "a secret"}]
    body = {"model": MODEL, "messages": said, "session_id": "s"}
    return await app.post("/v1/chat/completions", body, **headers)


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
    app, exporter = App(RecordingEngine(answer()), session_titles=True), InMemorySpanExporter()
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
