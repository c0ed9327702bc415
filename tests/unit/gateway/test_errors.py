"""Every failure has OpenAI's shape, a fitting status, and says what to do."""

from __future__ import annotations

import json

import pytest
from starlette.exceptions import HTTPException

from engines.base import EngineError, EngineRefused, EngineStalled, EngineUnavailable
from engines.openai.requests import InvalidRequest
from gateway.errors import Failure, failure_of
from gateway.relay.passthrough import engine_failure
from scheduler.sessions import Draining, MemoryScarce, Overloaded, SessionKept

KEYS = {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("no", "model", "model_not_found", 404), 404),
        (Overloaded("9 requests are waiting already", 4.2), 429),
        (MemoryScarce("the machine's memory is nearly used up", 5.0), 503),
        (Draining("over"), 503),
        (EngineStalled("silent"), 504),
        (EngineUnavailable("starting"), 503),
        (EngineRefused("no"), 502),
        (SessionKept("busy"), 409),
        (SessionKept("no-room"), 409),
        (EngineError("odd"), 502),
        (TimeoutError(), 504),
        (HTTPException(404), 404),
        (HTTPException(405), 405),
        (ZeroDivisionError("secret words"), 500),
    ],
)
def test_status_and_shape(error: Exception, status: int) -> None:
    response = failure_of(error).response()
    body = json.loads(bytes(response.body))["error"]
    assert response.status_code == status
    assert set(body) == KEYS
    assert body["message"] and body["type"]
    assert "secret" not in body["message"]


def test_retry_after_in_seconds_and_milliseconds() -> None:
    headers = failure_of(Overloaded("full", 4.2)).response().headers
    assert headers["retry-after"] == "5", "who comes after 4 s is refused again"
    assert headers["retry-after-ms"] == "4200"


def test_401_says_which_scheme() -> None:
    assert Failure(401, "no key").response().headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((500, x) for x in (b"Internal Server Error", b"\xff\xfe", b"[1]", b'{"detail": "x"}')),
        (401, b'{"error": {"message": "wrong token"}}'),
    ],
)
def test_an_engines_odd_error_and_a_401_of_its_own_get_our_shape(status, body):
    failure = engine_failure(status, body)
    assert failure.status == 502
    assert set(json.loads(failure.json())["error"]) == KEYS


def test_an_engines_own_error_is_kept() -> None:
    body = InvalidRequest("too long", "messages", "context_length_exceeded").body()
    failure = engine_failure(400, json.dumps(body).encode())
    assert failure == Failure(400, "too long", "messages", "context_length_exceeded")


def test_an_engines_error_message_is_for_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}'
    failure = engine_failure(500, body)
    assert (failure.status, failure.code) == (502, "engine")
    assert "EngineCore" not in failure.message and "EngineCore died" in caplog.text


def test_an_engines_odd_fields_are_not_passed_on() -> None:
    failure = engine_failure(400, b'{"error": {"message": 5, "param": {}, "code": [1]}}')
    assert failure == Failure(400, "5", None, None)


@pytest.mark.parametrize(
    ("said", "param", "message"),
    [
        (
            "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input"
            " should be a valid string', 'input': '<list of 5 items>'}\n  {'type': 'too_long',"
            " 'loc': 'body.stop', 'msg': 'List should have at most 4 items', 'input': '<list>'}",
            "stop",
            "stop: Input should be a valid string; List should have at most 4 items",
        ),
        (
            "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.stop_token_ids.0', 'msg':"
            " \"It's no integer\", 'input': 'a'}",
            "stop_token_ids[0]",
            "stop_token_ids[0]: It's no integer",
        ),
        ("top_k must be 0, -1 or more", "top_k", "top_k must be 0, -1 or more"),
    ],
)
def test_vllms_list_of_errors_becomes_a_sentence(said: str, param: str, message: str) -> None:
    body = json.dumps({"error": {"message": said, "param": param, "code": 400}})
    found = engine_failure(400, body.encode())
    assert (found.status, found.message, found.param) == (400, message, param)
