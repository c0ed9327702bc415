from __future__ import annotations

import json
import logging
import sys

import pytest

from launch.serve.logs import OneLine, OneObject


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
