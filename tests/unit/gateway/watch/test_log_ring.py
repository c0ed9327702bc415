"""The last lines of the log, without keys."""

from __future__ import annotations

import logging

import pytest

from gateway.keys import generate_key
from gateway.watch.log_ring import LogRing, redacted


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("thermocline.engines", level, "f", 1, text, (), None)


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
    broken = logging.LogRecord("thermocline.engines", logging.INFO, "f", 1, "%d", ("x",), None)
    ring.handle(broken)
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
