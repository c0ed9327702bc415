"""Open WebUI, as its package installs it, with the sample model: two users at work.

The benchmark calls Open WebUI's own API as its page does: chats that begin alike, an answer that is
generated again, a question that is edited, an answer that is stopped, titles, tags and follow-up
questions, and a chat that sleeps in between. A proxy records the session of each request, and how
many tokens of its prompt were reused. Everything stays on loopback. Installing takes minutes and
some gigabytes.

    python -m benchmarks.clients.open_webui --cache ~/.cache/thermocline/agents
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

from benchmarks.clients import packages
from benchmarks.clients.recorder import Exchange, Recorder, recording
from benchmarks.program import arguments
from benchmarks.stacks.lifeline import Running
from benchmarks.stacks.product_stack import Stack, free_port

START_S: Final = 300.0
TASK_S: Final = 600.0
MODEL: Final = "SmolLM2-135M-Instruct"
USER_HEADER: Final = "X-OpenWebUI-User-Id"
STOPPED_S: Final = 3.0  # from the question until its answer is stopped
TASKS: Final = ("title", "tags", "follow_up")
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "gateway": {"trust_user_header": USER_HEADER, "default_max_tokens": 48}
}
# Without these settings it looks for models at the hub, and for other engines.
_OFF = ("ENABLE_OLLAMA_API", "ENABLE_VERSION_UPDATE_CHECK", "ANONYMIZED_TELEMETRY")
_ON = ("OFFLINE_MODE", "ENABLE_FORWARD_USER_INFO_HEADERS", "BYPASS_MODEL_ACCESS_CONTROL")
_OWN = {"HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai", "WEBUI_SECRET_KEY": "of this run"}
OFFLINE: Final = {**dict.fromkeys(_OFF, "false"), **dict.fromkeys(_ON, "true"), **_OWN}
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def asked(
    url: str, body: Any = None, token: str = "", headers: dict[str, str] | None = None
) -> Any:
    """Send a POST, or a GET without ``body``; return the answer, which the caller closes."""
    own = {"content-type": "application/json", **(headers or {})}
    if token:
        own["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    return _OPENER.open(urllib.request.Request(url, data, own), timeout=TASK_S)


def answer_to(url: str, body: Any = None, token: str = "") -> Any:
    """Send a request as ``asked`` does, and return the JSON of its answer."""
    with asked(url, body, token) as answer:
        return json.load(answer)


class User(NamedTuple):
    """One user of the page."""

    url: str
    name: str
    token: str

    def new_chat(self) -> Chat:
        content = {"title": "New Chat", "models": [MODEL], "history": {}, "messages": []}
        made = answer_to(f"{self.url}/api/v1/chats/new", {"chat": content}, self.token)
        return Chat(self, str(made["id"]))


class Chat:
    """One chat of the page, with the messages that its model gets."""

    def __init__(self, user: User, id: str) -> None:
        self.user, self.id = user, id
        self.messages: list[dict[str, str]] = []

    def ask(self, words: str) -> None:
        self.messages.append({"role": "user", "content": words})
        self._answer()

    def again(self) -> None:
        """Generate the last answer again."""
        del self.messages[-1]
        self._answer()

    def edit(self, words: str) -> None:
        """Ask the last question in other words."""
        del self.messages[-2:]
        self.ask(words)

    def stop(self, words: str) -> None:
        """Ask, and stop the answer once it has begun."""
        self.messages.append({"role": "user", "content": words})
        id = self._begin()
        time.sleep(STOPPED_S)
        answer_to(f"{self.user.url}/api/tasks/chat/{self.id}/stop", {}, self.user.token)
        self._end(id)

    def tasks(self) -> None:
        """Send the prompts with which the page asks for a title, tags and follow-up questions."""
        body = {"model": MODEL, "messages": self.messages, "chat_id": self.id}
        for name in TASKS:
            answer_to(f"{self.user.url}/api/v1/tasks/{name}/completions", body, self.user.token)

    def _answer(self) -> None:
        self._end(self._begin())

    def _begin(self) -> str:
        """Ask as the page does; return the id under which Open WebUI stores the answer."""
        id = str(uuid4())
        body = {
            "model": MODEL,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_id": self.id,
            "session_id": str(uuid4()),
            "id": id,
            "params": {"function_calling": "legacy", "temperature": 0},
        }
        answer_to(f"{self.user.url}/api/chat/completions", body, self.user.token)
        return id

    def _end(self, id: str) -> None:
        """Wait for the end of an answer, and add it to the messages from Open WebUI's own chat.

        Raises ``RuntimeError`` if the answer is empty.
        """
        running = f"{self.user.url}/api/tasks/chat/{self.id}"
        while answer_to(running, token=self.user.token)["task_ids"]:
            time.sleep(0.25)
        kept = answer_to(f"{self.user.url}/api/v1/chats/{self.id}", token=self.user.token)["chat"]
        text = kept["history"]["messages"][id]["content"]
        if not text:
            raise RuntimeError(f"chat {self.id}: no word of an answer")
        self.messages.append({"role": "assistant", "content": text})


@contextmanager
def page(command: Path, recorder: Recorder, folder: Path) -> Iterator[str]:
    """Start Open WebUI; yield its address."""
    port = free_port()
    env = {**os.environ, **OFFLINE, "DATA_DIR": str(folder), "OPENAI_API_KEY": "none"}
    env["OPENAI_API_BASE_URL"] = f"{recorder.url}/v1"
    serve = [str(command), "serve", "--host", "127.0.0.1", "--port", str(port)]
    url, server = (
        f"http://127.0.0.1:{port}",
        Running(serve, folder / "log.txt", env=env, cwd=folder),
    )
    server.wait_for(f"{url}/health", START_S)
    try:
        yield url
    finally:
        server.end()


def users(url: str) -> tuple[User, User]:
    """Make two users; the first one is Open WebUI's admin."""
    secret = {"password": "a long enough one"}
    anna = {"name": "Anna", "email": "anna@example.com", **secret}
    boris = {"name": "Boris", "email": "boris@example.com", "role": "user", **secret}
    first = answer_to(f"{url}/api/v1/auths/signup", anna)
    second = answer_to(f"{url}/api/v1/auths/add", boris, first["token"])
    return User(url, "Anna", first["token"]), User(url, "Boris", second["token"])


def sleeps(server: str, chat: Chat, tenant: str) -> None:
    """Put a chat to sleep, and wait while its copy is being written."""
    for _ in range(80):
        path = f"{server}/v1/sessions/{chat.id}/demote"
        with asked(path, {}, headers={USER_HEADER: tenant}) as answer:
            if json.load(answer)["state"] == "cold":
                return
        time.sleep(0.25)
    raise TimeoutError(f"{chat.id} does not sleep")


def work(server: str, url: str) -> list[Chat]:
    """Let both users chat; return their chats."""
    anna, boris = users(url)
    ids = {
        x.name: str(answer_to(f"{url}/api/v1/auths/", None, x.token)["id"]) for x in (anna, boris)
    }
    chats = [anna.new_chat(), anna.new_chat(), boris.new_chat()]
    for chat in chats:  # they begin alike
        chat.ask("hi")
    first, second, others = chats
    first.ask("Name a river of Africa, and say in a sentence where it flows.")
    first.again()
    second.ask("What is a lake?")
    second.edit("What is a fjord, in one sentence?")
    others.stop("Tell me a long story about a harbour.")
    others.ask("Thank you. What is a harbour for?")
    for chat in chats:
        chat.tasks()
    for chat in (first, others):
        sleeps(server, chat, ids[chat.user.name])
        chat.ask("Say it again in other words, please.")
    return chats


def report(chats: list[Chat], exchanges: list[Exchange], sessions: list[dict[str, Any]]) -> str:
    """Return lines on the sessions, and on the tokens of later turns' prompts that were reused."""
    turns = [x for x in exchanges if x.session]
    lines, every = [], list[Exchange]()
    for chat in chats:
        own = [x for x in turns if x.session == chat.id]
        back = [x for x in own[1:] if x.is_turn]
        every += back
        each = ", ".join(f"{x.cached_tokens} of {x.prompt_tokens}" for x in back)
        lines.append(f"{chat.user.name}, {chat.id}: {len(own)} turns; of returns reused {each}")
    tasks = {x["id"] for x in sessions if x["kind"] == "task"}
    mains, tenants = (x["kind"] == "main" for x in sessions), {x["tenant"] for x in sessions}
    wrong = sorted({x.session for x in turns} - {x.id for x in chats} - tasks)
    errors = [x.error for x in exchanges if x.error]
    reused, prompts = sum(x.cached_tokens for x in every), sum(x.prompt_tokens for x in every)
    lines += [
        f"sessions: {sum(mains)} of {len(chats)} chats, {len(tasks)} of tasks",
        f"tenants: {len(tenants)}; requests in other sessions: {wrong or 'none'}",
        f"errors: {errors or 'none'}",
        f"reused of the prompts of returns: {reused} of {prompts} tokens ({reused / prompts:.0%})",
    ]
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__, f"--cache {packages.CACHE}")
    command = packages.pypi(Path(args.cache).expanduser(), "open-webui") / "open-webui"
    with (
        tempfile.TemporaryDirectory(prefix="thermocline-webui-") as folder,
        Stack(SETTINGS) as stack,
        recording(stack.url) as recorder,
        page(command, recorder, Path(folder)) as url,
    ):
        chats = work(stack.url, url)
        sessions = answer_to(f"{stack.url}/v1/snapshot")["sessions"]
        print(report(chats, recorder.exchanges, sessions))


if __name__ == "__main__":
    main()
