"""The product: gateway and engine as a user starts them, on a free port, and a client of it.

It is measured from outside, over HTTP and from the process table.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import psutil

from benchmarks.stacks.lifeline import Running

WORDS = """
river stone market winter garden engine letter bridge summer harbour window forest music doctor
silver travel kitchen morning village science painter history island captain ocean mountain paper
question answer teacher machine yellow quiet storm planet bottle animal story number color street
castle dinner friend voice corner coffee library journey
""".split()  # noqa: SIM905 - prose reads better as prose
MIB = 1 << 20
WORD_TOKENS = 1.02  # the sample model's tokens for each of these words, on average
ENGINES = ("engines.mlx_worker", "engines.vllm_plugin", "engines.fake_worker")  # as ``python -m``
# A stack does not wait until its model is measured: it uses this codec without a measurement.
UNMEASURED = {"codec": "tq3", "accept_loss": True, "calibrate": False}


@dataclass
class Reply:
    """An answer to a chat, with its times from the request's start and its token counts."""

    status: int
    text: str = ""
    ttft_s: float = float("nan")
    total_s: float = float("nan")
    cache: str = ""
    session: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: dict[str, Any] | None = None
    times: list[float] = field(default_factory=list)  # arrival of each piece, ``perf_counter``
    # Filled if the request has vLLM's field ``return_token_ids``.
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None


def prose(seed: int | str, num_words: int) -> str:
    """Return English words in random order; texts of two seeds begin differently."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def words_of(seed: int | str, tokens: float) -> str:
    """Return prose of about ``tokens`` tokens."""
    return prose(seed, max(4, int(tokens / WORD_TOKENS)))


def free_port() -> int:
    """Return a free port outside the range from which the system takes clients' ports."""
    while True:
        port = random.SystemRandom().randrange(22_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def toml_of(tables: dict[str, Any]) -> str:
    """Return a TOML file with these tables; a list of tables becomes an array of tables."""
    lines = []
    for table, content in tables.items():
        several = isinstance(content, list)
        for rows in content if several else [content]:
            lines.append(f"[[{table}]]" if several else f"[{table}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in rows.items()]
    return "\n".join(lines) + "\n"


@dataclass
class Stack:
    """A server. ``settings``: tables as in the configuration file, over the defaults."""

    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None  # for the data, which is kept; None: a temporary one
    port: int = field(default_factory=free_port)
    start_timeout_s: float = 300.0
    environment: dict[str, str] = field(default_factory=dict)  # added to this process's variables
    python: str = sys.executable

    def __post_init__(self) -> None:
        self._own = None if self.folder else tempfile.TemporaryDirectory(prefix="thermocline-")
        self.root = self.folder or Path(self._own.name)  # type: ignore[union-attr]
        self.root.mkdir(parents=True, exist_ok=True)
        self.log = self.root / "log.txt"
        self._running: Running | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Stack:
        config = self.root / "bench.toml"
        tables = {key: copy.copy(rows) for key, rows in self.settings.items()}
        tables.setdefault("gateway", {}).update(host="127.0.0.1", port=self.port)
        tables["store"] = {**UNMEASURED, **tables.get("store", {})}
        config.write_text(toml_of(tables))
        environment = {**os.environ, **self.environment}
        environment["THERMOCLINE_DATA_DIR"] = str(self.root / "data")
        command = [self.python, "-m", "launch", "serve", "--config", str(config)]
        self._running = Running(command, self.log, env=environment, patience_s=120)
        self.wait_ready(self.start_timeout_s)
        return self

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until it takes requests. Raises ``RuntimeError``, and ends it, if it does not."""
        assert self._running is not None
        self._running.wait_for(f"{self.url}/readyz", timeout_s)

    def tail(self) -> str:
        assert self._running is not None
        return self._running.tail()

    @property
    def gateway(self) -> psutil.Process:
        assert self._running is not None
        return psutil.Process(self._running.process.pid)

    @property
    def engine(self) -> psutil.Process:
        for child in self.gateway.children(recursive=True):
            if _is_engine(child):
                return child
        raise RuntimeError("no engine process")

    def stop(self) -> int:
        """Stop the server by SIGTERM, as a user would; return its exit code."""
        assert self._running is not None
        code, self._running = self._running.end(), None
        return code

    def kill(self, *, engine_too: bool = False) -> None:
        """Kill the gateway by SIGKILL, and the engine with it if ``engine_too``.

        Otherwise the engine notices that the gateway is gone, and ends by itself.
        """
        assert self._running is not None
        engine = self.engine
        if engine_too:
            engine.suspend()  # else it might notice the gateway's end, and save its sessions
        self._running.process.kill()
        self._running.process.wait()
        if engine_too:
            engine.kill()
        engine.wait(timeout=60)
        self.stop()

    def kill_engine(self, timeout_s: float = 300.0) -> None:
        """Kill the engine by SIGKILL; return when the gateway has started another one."""
        dead = self.engine
        dead.kill()
        self.wait_restarted(dead, timeout_s)

    def wait_restarted(self, dead: psutil.Process, timeout_s: float = 300.0) -> None:
        """Wait until another engine than ``dead`` runs and takes requests."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            engines = [x for x in self.gateway.children(recursive=True) if x.pid != dead.pid]
            if any(_is_engine(x) for x in engines):
                break
            time.sleep(0.1)
        self.wait_ready(deadline - time.monotonic())

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self.stop()
        if self._own is not None:
            self._own.cleanup()


class Server(Protocol):
    """A running server with an address."""

    @property
    def url(self) -> str: ...


class Client:
    """One user's HTTP client, which measures when a stream's first text arrives."""

    model: str

    def __init__(self, server: Server, http: aiohttp.ClientSession, key: str = "") -> None:
        self._url = server.url
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def chat(
        self,
        messages: list[dict[str, str]],
        session: str = "",
        max_tokens: int = 8,
        into: Reply | None = None,
        **fields: Any,
    ) -> Reply:
        """Ask for a streamed answer, and return it when it has ended.

        Args:
            into: filled while the answer arrives, and returned; None = a new ``Reply``.
            fields: further fields of the request's body.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        headers = {**self._headers, **({"X-Session-ID": session} if session else {})}
        start, reply = time.perf_counter(), into or Reply(0)
        url = f"{self._url}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as answer:
            reply.status = answer.status
            reply.cache = answer.headers.get("x-thermocline-cache", "")
            reply.session = answer.headers.get("x-thermocline-session", "")
            if answer.status != 200:
                reply.error = (await answer.json()).get("error")
                return reply
            async for line in answer.content:
                self._take(reply, line, start)
        reply.total_s = time.perf_counter() - start
        return reply

    @staticmethod
    def _take(reply: Reply, line: bytes, start: float) -> None:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            reply.error = event["error"]
            return
        if usage := event.get("usage"):
            reply.prompt_tokens = usage["prompt_tokens"]
            reply.completion_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}  # vLLM: none if nothing was cached
            reply.cached_tokens = details.get("cached_tokens", 0)
        reply.prompt_ids += event.get("prompt_token_ids") or []
        for choice in event.get("choices", []):
            reply.token_ids += choice.get("token_ids") or []
            text = choice["delta"].get("content") or ""
            reply.times += [time.perf_counter()] if text else []
            # An empty answer has no text: then its end counts as the first token.
            if (text or choice["finish_reason"]) and reply.ttft_s != reply.ttft_s:
                reply.ttft_s = time.perf_counter() - start
            reply.text += text

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Return the status and the answer. ``body``: bytes are sent unchanged, others as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {**self._headers, "content-type": "application/json"}
        async with self._http.request(
            method, self._url + path, data=data or None, headers=headers
        ) as answer:
            return answer.status, await answer.read()

    async def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return json.loads((await self.ask("POST", path, body or {}))[1])  # type: ignore[no-any-return]

    async def get(self, path: str) -> dict[str, Any]:
        return json.loads((await self.ask("GET", path))[1])  # type: ignore[no-any-return]

    async def delete(self, path: str) -> dict[str, Any]:
        return json.loads((await self.ask("DELETE", path))[1])  # type: ignore[no-any-return]

    async def sleep(self, session: str, state: str = "cold") -> dict[str, Any]:
        """Put a session to sleep, wait until it is in ``state``, and return its view."""
        await self.post(f"/v1/sessions/{session}/demote")
        return await self.until(session, state)

    async def until(self, session: str, state: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the session is in ``state``; return its view."""
        async with asyncio.timeout(timeout_s):
            while True:
                view = await self.get(f"/v1/sessions/{session}")
                if view.get("state") == state:
                    return view
                await asyncio.sleep(0.05)


@asynccontextmanager
async def client_of(server: Server, key: str = "") -> AsyncIterator[Client]:
    """Yield a client of the server's first model."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        client = Client(server, http, key)
        client.model = (await client.get("/v1/models"))["data"][0]["id"]
        yield client


def _is_engine(process: psutil.Process) -> bool:
    """Return whether a process is an engine's first one, not one that an engine started."""
    try:
        words = process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return False
    return words[1:2] == ["-m"] and words[2] in ENGINES
