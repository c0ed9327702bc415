"""The events of a response: complete, numbered, and the same for all boundaries of chunks."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.errors import Failure
from gateway.openai.responses.response import Draft, ResponseFields
from gateway.openai.responses.routes import replayed
from gateway.openai.responses.translation import EventWriter, ResponseAnswer

typed: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def chunk(reason: str | None = None, logprobs: Any = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def called(index: int, arguments: str, name: str | None = None) -> bytes:
    function = {"arguments": arguments, **({"name": name} if name else {})}
    call = {"index": index, "function": function, **({"id": f"call_{index}"} if name else {})}
    return chunk(tool_calls=[call])


def last(reason: str = "stop") -> bytes:
    usage = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
    return chunk(reason) + usage + b"data: [DONE]\n\n"


def everything(reason: str) -> bytes:
    score = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    return (
        chunk(role="assistant", content="")
        + b": prefill 1/2\n\n"
        + chunk(reasoning_content="hm")
        + chunk(reasoning="m")
        + chunk(content="a", logprobs={"content": [score]})
        + chunk(content="ü\n")
        + called(0, "", "look")
        + called(0, '{"x"')
        + called(0, ":1}")
        + called(1, '{"input": "text"}', "patch")
        + last(reason)
    )


def answered(pieces: list[bytes], failure: Failure | None = None) -> tuple[bytes, Any]:
    answer = ResponseAnswer(Draft(ResponseFields(model="m")), {"patch"})
    events = answer.events(None)
    stream = events.opening() + b"".join(map(events.feed, pieces)) + events.ending(failure)
    return stream, answer


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Parse a stream; checks framing, numbers and types of every event."""
    events = []
    assert stream.endswith(b"\n\n")
    for block in stream.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            assert block == ": keepalive"
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        typed.validate_python(event, strict=False)
        events.append(event)
    assert [x["sequence_number"] for x in events] == list(range(len(events)))
    return events


def without_chance(value: Any, ids: dict[str, str]) -> Any:
    """Number the ids in order of appearance, and drop times."""
    if isinstance(value, dict):
        rows = {k: v for k, v in value.items() if k not in ("created_at", "completed_at")}
        return {k: without_chance(v, ids) for k, v in rows.items()}
    if isinstance(value, list):
        return [without_chance(x, ids) for x in value]
    if isinstance(value, str) and value.split("_")[0] in ("resp", "msg", "rs", "fc", "ctc"):
        return ids.setdefault(value, f"id {len(ids)}")
    return value


def test_all_events_in_order() -> None:
    stream, _ = answered([everything("tool_calls")])
    events = events_of(stream)
    text, thought = "response.output_text", "response.reasoning_text"
    assert [x["type"] for x in events] == [
        "response.created",
        "response.in_progress",
        *("response.output_item.added", "response.content_part.added"),
        *(f"{thought}.delta", f"{thought}.delta", f"{thought}.done"),
        *("response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.content_part.added"),
        *(f"{text}.delta", f"{text}.delta", f"{text}.done"),
        *("response.content_part.done", "response.output_item.done"),
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * 2,
        "response.output_item.added",
        *("response.function_call_arguments.done", "response.output_item.done"),
        *("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"),
        *("response.output_item.done", "response.completed"),
    ]
    done = events[-1]["response"]
    reasoning, message, call, custom = done["output"]
    assert reasoning["content"][0]["text"] == "hmm"
    assert message["content"][0]["text"] == "aü\n"
    assert message["content"][0]["logprobs"][0]["token"] == "a"
    assert (call["name"], call["arguments"], call["call_id"]) == ("look", '{"x":1}', "call_0")
    assert (custom["type"], custom["input"]) == ("custom_tool_call", "text")
    assert done["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert Response.model_validate(done).output_text == "aü\n"


def test_a_stored_response_is_sent_again_in_the_same_order() -> None:
    stream, answer = answered([everything("stop")])
    live = events_of(stream)
    again = events_of(EventWriter().write(replayed(answer.response)))
    kinds = [[x["type"] for x in events] for events in (live, again)]
    assert [list(dict.fromkeys(x)) for x in kinds][1][:9] == list(dict.fromkeys(kinds[0]))[:9]
    assert set(kinds[0]) == set(kinds[1])
    assert again[-1]["response"] == live[-1]["response"]
    for kind in ("response.output_text.delta", "response.reasoning_text.delta"):
        texts = ["".join(x["delta"] for x in y if x["type"] == kind) for y in (live, again)]
        assert texts[0] == texts[1] != ""
    rest = EventWriter().write(replayed(answer.response), after=len(again) - 3)
    assert rest.count(b"\n\n") == 2


def test_every_item_is_added_before_it_is_spoken_of_and_done_once() -> None:
    events = events_of(answered([everything("stop")])[0])
    ids = {x["output_index"]: x["item"]["id"] for x in events if x["type"].endswith("item.added")}
    done = {x["output_index"]: x["item"] for x in events if x["type"].endswith("item.done")}
    assert list(ids) == [0, 1, 2, 3]
    assert {k: v["id"] for k, v in done.items()} == ids
    assert [done[i] for i in range(4)] == events[-1]["response"]["output"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == ids[event["output_index"]]


@given(st.lists(st.integers(0, len(everything("stop"))), max_size=30))
def test_boundaries_of_chunks_change_nothing(cuts: list[int]) -> None:
    whole = everything("stop")
    edges = sorted({0, len(whole), *cuts})
    pieces = [whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    one, other = (events_of(answered(x)[0]) for x in ([whole], pieces))
    assert without_chance(one, {}) == without_chance(other, {})


def test_a_whole_answer_has_the_same_output() -> None:
    streamed = events_of(answered([everything("stop")])[0])[-1]["response"]
    functions = [("look", '{"x":1}'), ("patch", '{"input": "text"}')]
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": text}}
        for i, (name, text) in enumerate(functions)
    ]
    score = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    message = {"role": "assistant", "content": "aü\n", "reasoning_content": "hmm"}
    choice = {
        "message": {**message, "tool_calls": calls},
        "finish_reason": "stop",
        "logprobs": {"content": [score]},
    }
    answer = ResponseAnswer(Draft(ResponseFields(model="m")), {"patch"})
    body = {"choices": [choice], "usage": USAGE}
    whole = json.loads(answer.whole(json.dumps(body).encode()))
    assert without_chance(whole, {}) == without_chance(streamed, {})
    assert json.loads(msgspec.json.encode(answer.response)) == whole


def test_an_answer_that_was_cut_short_is_incomplete() -> None:
    events = events_of(answered([chunk(content="a") + last("length")])[0])
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")


def test_nothing_at_all_is_a_response_too() -> None:
    events = events_of(answered([last("length")])[0])
    assert [x["type"] for x in events][2:] == ["response.incomplete"]
    assert events[-1]["response"]["output"] == []


def test_failures_end_the_stream_once() -> None:
    stream, answer = answered([chunk(content="a")], Failure(503, "it broke off"))
    failed = events_of(stream)[-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "it broke off"}
    assert answer.response is None
    error = b'data: {"error": {"message": "out of memory"}}\n\n'
    stream, answer = answered([chunk(content="a") + error], Failure(503, "it broke off"))
    assert events_of(stream)[-1]["response"]["error"]["message"] == "out of memory"
    assert answer.response is None
