"""What a coding agent's prompts reuse: Claude Code's wire, replayed against the whole product.

A main conversation with tools and two helpers in between, under one session id. As the real client
does it, every request has a line with a nonce at the head of its system text, a system message
after each tool result, tokens counted now and then, titles asked for under the conversation's id,
and one request is sent twice. All sessions are put to sleep several times. The conversations are
made up here after the documented shapes.

    python benchmarks/agents.py                      the real engine and the sample model
    python benchmarks/agents.py --engine fake        counts words; takes seconds
    python benchmarks/agents.py --without            helpers under their parent's id
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic

from benchmarks.stacks.fake_stack import FakeStack
from benchmarks.stacks.product_stack import MIB, UNMEASURED, Stack, prose

TARGET_SHARE = 0.99  # of the tokens of an earlier prompt and its answer; all others are new
FEW_TOKENS = 16  # of a tool call, which a template may write in other words than the model
SESSION = "11d4b1d2-agents"
TOOL: Any = {
    "name": "read_file",
    "description": "Reads a file. " + prose("tool", 60),
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string", "enum": ["a.py", "b.py", "c.py"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
CALLS: Any = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": TOOL["name"]}}


class Agent:
    """One conversation of the client: the main one, or a helper's."""

    def __init__(self, wire: Wire, name: str, system_words: int, step_words: int) -> None:
        self._wire = wire
        self._name = name
        self._step_words = step_words
        self._system = prose(f"system {name}", system_words)
        self._messages: list[Any] = [{"role": "user", "content": prose(f"task {name}", 40)}]
        self._num_turns = 0

    def turn(self) -> None:
        """Ask, and add the answer and a tool's result to the conversation."""
        said = self._wire.ask(self._name, self._system, self._messages)
        content = [x.to_dict() for x in said.content] or [{"type": "text", "text": "ok"}]
        result = prose(f"{self._name} {self._num_turns}", self._step_words)
        calls = [x.id for x in said.content if x.type == "tool_use"]
        answers: list[Any] = [
            {"type": "tool_result", "tool_use_id": call, "content": result} for call in calls
        ]
        left = f"<total_tokens>{200_000 - 700 * self._num_turns} tokens left</total_tokens>"
        self._messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": answers or result},
            {"role": "system", "content": left},
        ]
        self._num_turns += 1

    def count(self) -> None:
        self._wire.count(self._system, self._messages)

    def resend(self) -> None:
        """Send the latest request again, as after a timeout."""
        self._wire.ask(self._name, self._system, self._messages)
        self._wire.ask(self._name, self._system, self._messages)


class Wire:
    """The client's side of the wire, and the sum of the usage reported for its prompts."""

    def __init__(self, url: str, model: str, with_names: bool) -> None:
        self._url = url
        self._model = model
        self._with_names = with_names
        self._sdk = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=600)
        self._nonce = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.num_requests = 0
        # By agent: the tokens of its latest prompt and answer, which its next prompt begins with.
        self._held: dict[str, int] = {}
        self.known_tokens = 0  # the sum of these: the most that could be reused
        self.losses: list[str] = []  # requests that reused much less

    def ask(self, agent: str, system: str, messages: list[Any]) -> Any:
        with self._sdk.messages.stream(
            model=self._model,
            max_tokens=40,
            system=self._blocks(system),
            messages=messages,
            **({} if agent == "title" else CALLS),
            extra_headers=self._headers(agent),
        ) as stream:
            said = stream.get_final_message()
        usage = said.usage
        read = usage.cache_read_input_tokens or 0
        self.cached_tokens += read
        self.prompt_tokens += read + usage.input_tokens + (usage.cache_creation_input_tokens or 0)
        self.num_requests += 1
        prompt = read + usage.input_tokens + (usage.cache_creation_input_tokens or 0)
        held = min(self._held.get(agent, 0), prompt - 1)
        if agent == "title":  # each is about something else
            held = 0
        self.known_tokens += held
        if held - read > FEW_TOKENS:
            self.losses.append(f"request {self.num_requests} ({agent}): {read} of {held}")
        self._held[agent] = prompt + usage.output_tokens
        return said

    def count(self, system: str, messages: list[Any]) -> None:
        self._sdk.messages.count_tokens(
            model=self._model, system=self._blocks(system), messages=messages, tools=[TOOL]
        )

    def _blocks(self, system: str) -> Any:
        self._nonce += 1
        nonce = f"x-anthropic-billing-header: cc_version=2.1; cch={self._nonce * 7919:05x};"
        kept = {"type": "ephemeral", "ttl": "5m"}
        return [
            {"type": "text", "text": nonce},
            {"type": "text", "text": system, "cache_control": kept},
        ]

    def _headers(self, agent: str) -> dict[str, str]:
        if not self._with_names:
            return {"x-session-id": SESSION}
        helper = {} if agent in ("main", "title") else {"x-claude-code-agent-id": agent}
        return {"x-claude-code-session-id": SESSION, **helper}

    def sleep_all(self) -> None:
        """Put every session to sleep, as a pause would."""
        with urllib.request.urlopen(f"{self._url}/v1/sessions", timeout=60) as answer:
            sessions = json.load(answer)["data"]
        for session in sessions:
            asked = urllib.request.Request(
                f"{self._url}/v1/sessions/{session['id']}/demote",
                data=b"{}",
                headers={"content-type": "application/json"},
            )
            for _ in range(40):  # 409: the last turn is still being saved
                with suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(asked, timeout=120).close()
                    break
                time.sleep(0.25)


def ask_beside(wire: Wire, turn: int) -> None:
    """Ask for a title, as agents do under the id of their conversation."""
    asked = f"Generate a title for this conversation: {prose(f'title {turn}', 30)}"
    wire.ask("title", "You write titles. One line.", [{"role": "user", "content": asked}])


def replay(wire: Wire, turns: int, words: int) -> dict[str, Any]:
    """Run the whole task; returns shares of all prompt tokens that were reused."""
    step = max(8, words // 75)
    main = Agent(wire, "main", words, step)
    helpers = [Agent(wire, f"helper-{i}", words // 4, step) for i in (1, 2)]
    for turn in range(turns):
        main.turn()
        if turns // 4 <= turn < turns // 2:
            helpers[0].turn()
        if turns // 3 <= turn < turns * 2 // 3:
            helpers[1].turn()
        if turn % 5 == 0:
            main.count()
            ask_beside(wire, turn)
        if turn == turns // 5:
            main.resend()
        if turn % 8 == 7:
            wire.sleep_all()
    return {
        "reused_share": round(wire.cached_tokens / wire.prompt_tokens, 4),
        "possible_share": round(wire.known_tokens / wire.prompt_tokens, 4),
        "losses": wire.losses,
        "prompt_tokens": wire.prompt_tokens,
        "requests": wire.num_requests,
    }


@contextmanager
def stack_of(engine: str, model: str = "") -> Iterator[str]:
    """Start gateway and engine; yields their URL."""
    if engine == "fake":
        with tempfile.TemporaryDirectory() as folder, FakeStack(Path(folder)) as fake:
            yield fake.url
        return
    settings = {
        "engine": {"hot_bytes": 1024 * MIB, "model": model},
        "store": {**UNMEASURED, "ram_bytes": 512 * MIB, "disk_bytes": 1024 * MIB},
        "scheduler": {"idle_after_s": 3600.0},
    }
    with Stack(settings) as stack:
        yield stack.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=["mlx", "fake"], default="mlx")
    parser.add_argument("--model", default="", help="a folder; default: the sample model")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--words", type=int, default=1500, help="of the main system text")
    parser.add_argument("--without", action="store_true", help="helpers are not recognised")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with stack_of(args.engine, args.model) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
        figures: dict[str, Any] = replay(Wire(url, model, not args.without), args.turns, args.words)
    figures |= {"engine": args.engine, "recognised": not args.without}
    figures["of_possible"] = round(figures["reused_share"] / figures["possible_share"], 4)
    figures["target"] = args.without or figures["of_possible"] >= TARGET_SHARE
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
