"""Gateway and vLLM as a user starts them, through OpenAI's official SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from benchmarks.stacks.product_stack import Stack, prose
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def sdk(vllm_stack: Stack) -> Iterator[openai.OpenAI]:
    url = f"{vllm_stack.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
        yield sdk


def ask(sdk: openai.OpenAI, messages: list[dict[str, str]], session: str, **fields):
    return sdk.chat.completions.with_raw_response.create(
        model=sdk.models.list().data[0].id,
        messages=messages,
        temperature=0,
        max_tokens=fields.pop("max_tokens", 8),
        extra_headers={"X-Session-ID": session},
        **fields,
    )


def state_of(sdk: openai.OpenAI, session: str) -> dict[str, object]:
    return sdk.get(f"/sessions/{session}", cast_to=object)


def wait_for(sdk: openai.OpenAI, session: str, state: str) -> None:
    until(lambda: state_of(sdk, session)["state"] == state, what=state_of(sdk, session))


def test_the_log_says_how_sessions_are_stored(vllm_stack):
    """vLLM sets up logging for its own lines only."""
    assert "sessions are stored exactly, by raw" in vllm_stack.log.read_text()


def test_a_chat_goes_cold_and_comes_back(sdk):
    history = [{"role": "user", "content": f"{prose('vllm', 400)}? In one word."}]
    answer = ask(sdk, history, "chat")
    first = answer.parse()
    assert answer.headers["x-thermocline-cache"].startswith("miss; tokens=0")
    assert first.usage.prompt_tokens > 400
    wait_for(sdk, "chat", "idle")
    sdk.post("/sessions/chat/demote", cast_to=object)
    wait_for(sdk, "chat", "cold")
    history.append({"role": "assistant", "content": first.choices[0].message.content})
    history.append({"role": "user", "content": "And another?"})
    answer = ask(sdk, history, "chat")
    usage = answer.parse().usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert answer.headers["x-thermocline-cache"] == f"cold-ram; tokens={cached}"
    assert cached >= (first.usage.total_tokens - 1) // 32 * 32
    assert state_of(sdk, "chat")["state"] in ("active", "idle")


def test_a_stream_wakes_a_session_with_the_very_same_text(sdk):
    history = [{"role": "user", "content": f"{prose('stream', 300)}? Tell me more."}]
    text = ask(sdk, history, "stream").parse().choices[0].message.content
    wait_for(sdk, "stream", "idle")
    sdk.post("/sessions/stream/demote", body={"tier": "disk"}, cast_to=object)
    wait_for(sdk, "stream", "cold")
    answer = ask(sdk, history, "stream", stream=True, stream_options={"include_usage": True})
    assert answer.headers["x-thermocline-cache"].startswith("cold-disk; tokens=")
    chunks = list(answer.parse())
    assert "".join(x.choices[0].delta.content or "" for x in chunks if x.choices) == text
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 288


FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
        "units": {"type": "object", "properties": {"wind": {"enum": ["kmh", "kn"]}}},
    },
    "required": ["city", "days", "units"],
}


def functions() -> list[dict[str, object]]:
    """Two tools without a word on how strictly they are meant, as most clients offer theirs."""
    other = {"type": "object", "properties": {}}
    return [
        {"type": "function", "function": {"name": "forecast", "parameters": FORECAST}},
        {"type": "function", "function": {"name": "nothing", "parameters": other}},
    ]


def called(sdk: openai.OpenAI, session: str, choice: object, stream: bool):
    """Ask for a call; returns the calls by name, and the number of tokens in the prompt."""
    fields = {"tools": functions(), "tool_choice": choice, "max_tokens": 120}
    asked = [{"role": "user", "content": "What will the weather be in Rome?"}]
    if not stream:
        answer = ask(sdk, asked, session, **fields).parse()
        calls = [
            (x.function.name, x.function.arguments) for x in answer.choices[0].message.tool_calls
        ]
        return calls, answer.usage.prompt_tokens
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(sdk, asked, session, **fields).parse())
    found: dict[int, list[str]] = {}
    for delta in (x.choices[0].delta for x in chunks if x.choices):
        for call in delta.tool_calls or ():
            own = found.setdefault(call.index, ["", ""])
            own[0] += call.function.name or ""
            own[1] += call.function.arguments or ""
    return [tuple(x) for x in found.values()], chunks[-1].usage.prompt_tokens


@pytest.mark.parametrize(
    ("choice", "stream"), [("required", False), ("required", True), ("named", True)]
)
def test_the_arguments_of_a_forced_call_satisfy_the_schema(sdk, choice, stream):
    named = {"type": "function", "function": {"name": "forecast"}}
    forced = named if choice == "named" else "required"
    calls, prompt_tokens = called(sdk, f"forced-{choice}-{stream}", forced, stream)
    assert calls
    for name, arguments in calls:
        said = json.loads(arguments)
        if name == "nothing":
            assert said == {}
            continue
        assert said.keys() == {"city", "days", "units"}
        assert said["city"] in ("Paris", "Rome") and said["days"] in (1, 2, 3)
        assert said["units"] in ({}, {"wind": "kmh"}, {"wind": "kn"})
    if choice == "named":
        assert {name for name, _ in calls} == {"forecast"}
    free = ask(
        sdk,
        [{"role": "user", "content": "What will the weather be in Rome?"}],
        "free",
        tools=functions(),
    ).parse()
    assert prompt_tokens == free.usage.prompt_tokens  # forcing a call changes no prompt
