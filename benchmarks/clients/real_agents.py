"""Coding agents as their packages install them, each with a small task of several turns.

Codex, OpenCode, qwen-code, Claude Code (npm) and aider (PyPI) are installed into a folder of their
own, configured for the server by ``thermocline connect``, without a key, and asked three questions
in one conversation. A proxy records the requests and their errors, how much of the second and the
third turn's prompt was reused, and the sessions that the server made of them. What the model
answers does not matter. Everything stays on loopback.

    python -m benchmarks.clients.real_agents --cache ~/.cache/thermocline/agents
    python -m benchmarks.clients.real_agents --engine vllm
    python -m benchmarks.clients.real_agents --engine fake --only codex,aider
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clients import packages
from benchmarks.clients.recorder import Exchange, recording
from benchmarks.clients.roomy_model import roomy_model
from benchmarks.program import arguments, table, write_json
from benchmarks.stacks.fake_stack import FakeStack
from benchmarks.stacks.product_stack import MIB, Stack
from benchmarks.stacks.vllm_stack import START_S, python_with_vllm

TURN_S = 420.0
ANSWER_TOKENS = 64
TASK = (
    "Read notes.txt and say in one sentence what it is about.",
    "Which numbers are in it?",
    "Thank you. Say what we did so far.",
)


@dataclass(frozen=True)
class Agent:
    """A client: its installer, and its command lines for a first and a later turn."""

    name: str  # its name for ``thermocline connect``
    package: str  # of npm, or a key of ``packages.PYPI``
    command: str
    first: tuple[str, ...]
    later: tuple[str, ...]
    postinstall: str = ""  # a script of the package, which npm does not run itself
    env: Mapping[str, str] = field(default_factory=dict)


_CODEX = (
    "--skip-git-repo-check",
    "--dangerously-bypass-approvals-and-sandbox",
    "--config=check_for_update_on_startup=false",
    "--config=analytics.enabled=false",
)
_AIDER = (
    "--yes-always",
    "--no-git",
    "--no-stream",
    "--no-check-update",
    "--no-show-model-warnings",
)
# Else Claude Code asks for as many tokens as ``connect`` allows, and the model may use them all.
_SHORT = json.dumps({"env": {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(ANSWER_TOKENS)}})
_AGENTS = (
    Agent(
        "codex",
        "@openai/codex",
        "codex",
        ("exec", *_CODEX, "{ask}"),
        ("exec", "resume", "--last", *_CODEX, "{ask}"),
    ),
    Agent(
        "opencode",
        "opencode-ai",
        "opencode",
        ("run", "{ask}"),
        ("run", "--continue", "{ask}"),
        "postinstall.mjs",
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    Agent(
        "qwen-code",
        "@qwen-code/qwen-code",
        "qwen",
        ("--auth-type", "openai", "--yolo", "{ask}"),
        ("--auth-type", "openai", "--yolo", "--continue", "{ask}"),
        "",
        {"QWEN_CODE_MAX_OUTPUT_TOKENS": str(ANSWER_TOKENS), "QWEN_TELEMETRY_ENABLED": "false"},
    ),
    Agent(
        "claude",
        "@anthropic-ai/claude-code",
        "claude",
        ("--settings", _SHORT, "-p", "{ask}"),
        ("--settings", _SHORT, "-p", "--continue", "{ask}"),
        "install.cjs",
        {"DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1"},
    ),
    Agent(
        "aider",
        "aider",
        "aider",
        (*_AIDER, "--message", "{ask}", "notes.txt"),
        (*_AIDER, "--restore-chat-history", "--message", "{ask}", "notes.txt"),
        "",
        {"AIDER_ANALYTICS": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
)

AGENTS = {x.name: x for x in _AGENTS}
HEAD = (
    *("agent", "version", "requests", "with a prompt", "errors", "second prompt, tokens"),
    *("of it reused", "third prompt, tokens", "of it reused"),
)


@dataclass
class Prompt:
    """The longest prompt of a turn, and the number of its tokens that were reused."""

    tokens: int = 0
    cached: int = 0

    def __str__(self) -> str:
        return f"{self.tokens:,} | {self.cached / self.tokens:.1%}" if self.tokens else "0 | -"


@dataclass
class Outcome:
    """The requests of one agent's task, and their results."""

    agent: str
    version: str
    num_requests: int = 0
    num_turns: int = 0  # requests that read a prompt
    errors: list[str] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    second: Prompt = field(default_factory=Prompt)
    last: Prompt = field(default_factory=Prompt)
    paths: dict[str, int] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)  # those on the server, with their kinds

    @property
    def failed(self) -> bool:
        return bool(self.errors) or any(self.exit_codes) or not self.second.cached


def install(agent: Agent, cache: Path) -> Path:
    """Install a client if needed; return its command."""
    if agent.package in packages.PYPI:
        return packages.pypi(cache, agent.package) / agent.command
    modules = packages.npm(cache, agent.package) / "node_modules"
    if agent.postinstall:
        packages.run(["node", agent.postinstall], modules / agent.package)
    return modules / ".bin" / agent.command


def perform(agent: Agent, command: Path, url: str, room: Path) -> Outcome:
    """Let one agent do the task, with its own home and project folders in ``room``."""
    home, project = room / "home", room / "project"
    for folder in (home, project):
        folder.mkdir(parents=True)
    (project / "notes.txt").write_text("Of 12 stones in the river, 5 are white and 7 are grey.\n")
    env = {**_own_environment(home, project), **agent.env}
    with recording(url) as recorder:
        connect = [sys.executable, "-m", "launch", "connect", agent.name, "--write"]
        connect += ["--url", recorder.url]
        connected = subprocess.run(
            connect,
            env={**env, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
        )
        if connected.returncode:
            raise RuntimeError(connected.stderr)
        recorder.exchanges.clear()
        outcome = Outcome(agent.name, _version(command, env))
        marks: list[int] = []
        for i, ask in enumerate(TASK):
            marks.append(len(recorder.exchanges))
            line = [x.replace("{ask}", ask) for x in (agent.later if i else agent.first)]
            log = room / f"{i}.txt"
            outcome.exit_codes.append(_turn([str(command), *line], env, project, log))
            if outcome.exit_codes[-1]:
                print(log.read_text(errors="replace").strip()[-300:], flush=True)
    _sum_up(outcome, recorder.exchanges, marks)
    return outcome


def _own_environment(home: Path, project: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TERM", "TMPDIR")}
    folders = {"HOME": str(home), "PWD": str(project), "XDG_CONFIG_HOME": str(home / ".config")}
    return {**kept, **folders, "NO_PROXY": "*", "CI": "1", "NO_COLOR": "1"}


def _turn(command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> int:
    with log.open("wb") as out, suppress(subprocess.TimeoutExpired):
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        return subprocess.run(command, env=env, cwd=folder, timeout=TURN_S, **streams).returncode
    return 124


def _version(command: Path, env: Mapping[str, str]) -> str:
    asked = subprocess.run([str(command), "--version"], env=env, capture_output=True, text=True)
    words = (asked.stdout.strip().splitlines() or ["?"])[-1].split()
    return next((word for word in words if word[0].isdigit()), words[0])


def _sum_up(outcome: Outcome, exchanges: Sequence[Exchange], marks: Sequence[int]) -> None:
    turns = [x for x in exchanges if x.is_turn]
    outcome.num_requests, outcome.num_turns = len(exchanges), len(turns)
    for exchange in exchanges:
        path = f"{exchange.method} {exchange.path.partition('?')[0]}"
        outcome.paths[path] = outcome.paths.get(path, 0) + 1
        if exchange.error:
            outcome.errors.append(f"{exchange.status} {path}: {exchange.error}")
    outcome.second = _longest(exchanges[marks[1] : marks[2]])
    outcome.last = _longest(exchanges[marks[2] :])


def _longest(exchanges: Sequence[Exchange]) -> Prompt:
    longest = max(exchanges, key=lambda x: x.prompt_tokens, default=Exchange("", ""))
    return Prompt(longest.prompt_tokens, longest.cached_tokens)


def listed(url: str) -> dict[str, str]:
    """Return the server's sessions by id: their kind, their parent if any, and tokens."""
    rows = []
    for which in ("", "?kind=task"):
        with urllib.request.urlopen(f"{url}/v1/sessions{which}", timeout=60) as answer:
            rows += json.load(answer)["data"]
    return {
        x["id"]: f"{x['kind']}{' of ' + x['parent'] if x['parent'] else ''}, {x['tokens']:,} tokens"
        for x in rows
    }


@contextmanager
def server(engine: str, cache: Path, model: str = "") -> Iterator[str]:
    """Start gateway and engine; yield their URL. ``model``: a folder; "" = ``roomy_model``."""
    gateway: dict[str, Any] = {"model_aliases": ["*"], "default_max_tokens": ANSWER_TOKENS}
    gateway["max_body_bytes"] = 32 * MIB
    if engine == "fake":
        with tempfile.TemporaryDirectory() as folder:
            size = {"max_context": 131_072}
            with FakeStack(Path(folder), gateway=gateway, engine=size) as fake:
                yield fake.url
        return
    settings: dict[str, Any] = {
        "gateway": gateway,
        "engine": {"model": model or str(roomy_model(cache / "roomy")), "hot_bytes": 2048 * MIB},
        "store": {"ram_bytes": 256 * MIB, "disk_bytes": 0},
    }
    if engine == "vllm":
        settings["engine"] |= {"kind": "vllm", "vllm.python": python_with_vllm()}
    with Stack(settings, start_timeout_s=START_S) as stack:
        yield stack.url


def cells(x: Outcome) -> list[object]:
    errors = len(x.errors) or (f"exit {max(x.exit_codes)}" if any(x.exit_codes) else 0)
    return [x.agent, x.version, x.num_requests, x.num_turns, errors, x.second, x.last]


def main() -> int:
    line = f"--engine mlx|vllm|fake --cache {packages.CACHE} --only {','.join(AGENTS)}"
    args = arguments(__doc__, line)
    cache = Path(args.cache).expanduser().resolve()
    outcomes = []
    with server(args.engine, cache) as url:
        for agent in (AGENTS[x] for x in args.only.split(",")):
            command, before = install(agent, cache), listed(url)
            with tempfile.TemporaryDirectory(prefix="agent-") as room:
                outcome = perform(agent, command, url, Path(room))
            outcome.sessions = [f"{x}: {y}" for x, y in listed(url).items() if x not in before]
            outcomes.append(outcome)
            print(json.dumps(asdict(outcome), indent=1), flush=True)
    write_json(args.json, [asdict(x) for x in outcomes])
    print(*table(HEAD, [cells(x) for x in outcomes]), sep="\n")
    return 1 if any(x.failed for x in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
