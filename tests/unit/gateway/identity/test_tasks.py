"""Prompts that programs ask beside a conversation are no conversations."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.identity.names import TASK_TOKENS, is_task_session, shared_task_session
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer

HISTORY = "### Chat History:\n<chat_history>\nUSER: hi\nASSISTANT: hello\n</chat_history>"
TITLE = f"### Task:\nGenerate a concise, 3-5 word title with an emoji.\n{HISTORY}"
TAGS = f"### Task:\nGenerate 1-3 broad tags categorizing the main themes.\n{HISTORY}"
LIBRECHAT = "Provide a concise, 5-word-or-less title for the conversation, using title case."
SUMMARY = "Progressively summarize the lines of conversation provided, adding onto the summary."
RAG = "### Task:\nRespond to the user query using the provided context.\n<context>x</context>"


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": MODEL, "messages": said, **fields}


@pytest.mark.parametrize("text", [TITLE, TAGS, LIBRECHAT, SUMMARY])
def test_a_programs_prompt_is_a_task(text: str) -> None:
    row = shared_task_session(chat(text))
    assert row is not None and is_task_session(row)
    told = {"role": "system", "content": "Be brief."}
    parts = {"role": "user", "content": [{"type": "text", "text": text}]}
    assert shared_task_session({"messages": [told, parts]}) == row


@pytest.mark.parametrize(
    "asked",
    [
        chat("hi"),
        chat(RAG),
        chat(f"{RAG}\n<context>{HISTORY}</context>\nWhat does that prompt do?"),
        chat(f"Explain this prompt: {TITLE}"),
        chat("### Task: write a poem"),
        chat(TITLE, stream=True),  # somebody reads it as it comes
        chat(TITLE, tools=[{}]),
        chat(TITLE, "A title", "A better one, please"),
        chat("hi", "hello", TITLE),  # the conversation itself goes on
    ],
)
def test_what_a_person_may_have_asked_is_none(asked: dict[str, Any]) -> None:
    assert shared_task_session(asked) is None


def test_tasks_share_a_few_rows() -> None:
    texts = [f"### Task:\nDo thing {i}.\n{HISTORY}" for i in range(200)]
    assert len({shared_task_session(chat(x)) for x in texts}) <= 16
    other = TITLE.replace("hello", "good evening")
    assert shared_task_session(chat(TITLE)) == shared_task_session(chat(other))
    assert shared_task_session(chat(TITLE)) != shared_task_session(chat(TAGS))


DIALECTS = [
    ("/v1/chat/completions", chat),
    ("/v1/responses", lambda text: {"model": MODEL, "input": text, "store": False}),
    ("/v1/messages", lambda text: chat(text, max_tokens=64)),
]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_every_dialect_lists_tasks_apart(path: str, body: Any) -> None:
    app = App(RecordingEngine(chat_answer()), sessions=1)
    assert (await app.post(path, body("hi"), x_openwebui_chat_id="c")).status == 200
    for text in (TITLE, TAGS):
        reply = await app.post(path, body(text), x_openwebui_chat_id="c")
        assert (reply.status, reply.headers["x-thermocline-session"]) == (200, "c/(task)")
    replies = [await app.post(path, body(TITLE)) for _ in range(2)]
    (alone,) = {x.headers["x-thermocline-session"] for x in replies}
    assert is_task_session(alone)
    assert [x["id"] for x in (await app.get("/v1/sessions")).json["data"]] == ["c"]
    tasks = {x["id"]: x for x in (await app.get("/v1/sessions?kind=task")).json["data"]}
    assert tasks.keys() == {"c/(task)", alone}
    assert {x["kind"] for x in tasks.values()} == {"task"} and tasks["c/(task)"]["parent"] == "c"
    assert app.sessions.num_sessions("local") == 1
    assert (await app.call("DELETE", "/v1/sessions/c", b"", {})).status == 200
    assert [x["id"] for x in (await app.get("/v1/sessions?kind=task")).json["data"]] == [alone]


async def test_a_task_ends_where_it_names_no_end() -> None:
    app = App(RecordingEngine(chat_answer()), default_max_tokens=90)
    short = App(RecordingEngine(chat_answer()))
    for each in (app, short):
        for fields in ({}, {"max_tokens": 50}):
            await each.post("/v1/chat/completions", chat(TITLE, **fields))
    limits = [[x.body.get("max_tokens") for x in each.engine.asked] for each in (app, short)]
    assert limits == [[90, 50], [None, 50]]  # the context of 100 tokens ends it before TASK_TOKENS
    assert TASK_TOKENS > 100


async def test_a_wrong_kind_is_refused() -> None:
    reply = await App().get("/v1/sessions?kind=other")
    assert (reply.status, reply.error["param"]) == (400, "kind")


async def test_no_client_names_a_conversation_as_tasks_are_named() -> None:
    """After a restart a task is known by its id alone; conversations count in a key's limit."""
    app = App(RecordingEngine(chat_answer()))
    for id in ("mine/(task)", "(task-3)"):
        reply = await app.post("/v1/chat/completions", chat("hi"), x_session_id=id)
        assert (reply.status, reply.error["param"]) == (400, "X-Session-ID")
    for id in ("mine/task", "task-3"):
        assert not is_task_session(id)
        await app.post("/v1/chat/completions", chat("hi"), x_session_id=id)
    assert app.sessions.num_sessions("local") == 2
