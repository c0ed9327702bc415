"""Lines of the log, and the last of them for admins."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from gateway.keys import generate_key
from gateway.watch.logs import LogRing, OneLine, OneObject, redacted


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
    fields = json.loads(line)
    assert (fields["message"], fields["request_id"], fields["session"]) == (
        "turn of x\ny",
        "req_1",
        "s\n1",
    )
    assert "session" not in json.loads(OneObject().format(record("plain")))


def info(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("thermocline.engines", level, "f", 1, text, (), None)


def test_it_keeps_the_last_lines_and_returns_the_new_ones():
    ring = LogRing(max_lines=3)
    for i in range(5):
        ring.handle(info(f"line {i}"))
    assert [x.text for x in ring.lines(0, 10)] == ["line 2", "line 3", "line 4"]
    assert [x.text for x in ring.lines(4, 10)] == ["line 4"]
    assert [x.text for x in ring.lines(0, 1)] == ["line 4"]
    assert ring.lines(5, 10) == []


def test_a_record_that_cannot_be_read_raises_nothing(capsys: pytest.CaptureFixture[str]):
    ring = LogRing()
    broken = logging.LogRecord("thermocline.engines", logging.INFO, "f", 1, "%d", ("x",), None)
    ring.handle(broken)
    assert "Logging error" in capsys.readouterr().err
    ring.handle(info("next"))
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
    ring.handle(info(text.replace("SECRET", secret)))
    assert secret not in ring.lines(0, 1)[0].text


def test_a_bare_key_or_hash_is_not_kept_and_plain_words_are():
    key, line = generate_key("t")
    assert key not in redacted(f"got {key}, it seems")
    assert line.partition(":")[2] not in redacted(line)
    plain = "session task-1: idle -> cold (evicted); 12 MiB at 127.0.0.1:8080"
    assert redacted(plain) == plain
