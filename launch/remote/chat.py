"""A chat in the terminal: reads a line, sends it or runs it as a command, and shows the answer.

Answers go to standard output and all else to standard error, so a pipe gets only the answers.
Standard input may be a pipe; then each of its lines is a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import aiohttp
from rich.console import Console
from rich.text import Text

from launch.errors import LaunchError
from launch.printing import safe
from launch.remote.server import Address, words_of
from launch.remote.turn import MISS, UNKNOWN, Message, RemoteTurn, take_turn
from launch.settings.units import show_bytes, show_duration

BUSY_ROUNDS, BUSY_S = 20, 0.25
NO_SESSIONS = "this server has no sessions to look at; is it a Thermocline gateway?"
# States of a session whose KV is in the engine's memory.
HOT = ("active", "idle", "saving", "hibernating")
_STYLES = {"hot": "green", "miss": "yellow", "unknown": "dim"}
HELP: Final = {
    "/sleep": "let the session sleep now: its KV leaves the engine's memory",
    "/wake": "bring it back before the next message",
    "/pin": "keep it from being evicted",
    "/unpin": "take the pin back",
    "/info": "what the server knows of the session",
    "/forget": "remove it from every tier, and begin anew",
    "/new": "begin anew; the old session stays",
    "/quit": "leave (or Ctrl-D)",
    "/help": "this list; a line that begins with // is sent as it is, less one slash",
}
_VERBS: Final = {"/sleep": "demote", "/wake": "prefetch", "/pin": "pin", "/unpin": "unpin"}
PROMPT = "> "
MOST_CHARACTERS = 1 << 20  # of one line of a pipe


class ChatOptions(NamedTuple):
    """The options of the command; "" and 0 = the server's own values."""

    model: str
    session: str
    system: str
    max_tokens: int
    temperature: float
    quiet: bool


class Talk:
    """A conversation; a turn that fails or is stopped is not added to it."""

    def __init__(
        self, http: aiohttp.ClientSession, address: Address, model: str, options: ChatOptions
    ) -> None:
        self._http, self._address, self._model = http, address, model
        self._options = options
        self.begin(options.session)

    def begin(self, session: str = "") -> None:
        """Begin a new conversation; ``session``: the id of its session, "" = a new one."""
        self.session = session or f"chat-{secrets.token_hex(4)}"
        system = self._options.system
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    async def ask(self, text: str, on_text: Callable[[str], None]) -> RemoteTurn:
        """Send ``text``, read the answer and return the turn, which also holds any error."""
        said = {"role": "user", "content": text}
        turn = await take_turn(
            self._http,
            self._address,
            self._model,
            [*self.messages, said],
            session=self.session,
            max_tokens=self._options.max_tokens,
            fields={"temperature": self._options.temperature},
            on_text=on_text,
        )
        if turn.ok:
            self.messages += [said, {"role": "assistant", "content": turn.text}]
        return turn

    async def look(self) -> dict[str, Any] | None:
        """Return the server's report of the session; None if the server does not know it."""
        status, content = await self._address.ask(self._http, "GET", self._path())
        return content if status == 200 and isinstance(content, dict) else None

    async def act(self, verb: str) -> dict[str, Any]:
        """Post ``verb`` for the session; return its report. Raises ``LaunchError`` on refusal."""
        path = f"{self._path()}/{verb}"
        for _ in range(BUSY_ROUNDS):
            status, content = await self._address.ask(self._http, "POST", path, {})
            if status != 409:  # 409: the last turn has not quite ended
                break
            await asyncio.sleep(BUSY_S)
        return _checked(status, content)

    async def forget(self) -> None:
        """Remove the session from every tier, and begin a new one."""
        _checked(*await self._address.ask(self._http, "DELETE", self._path()))
        self.begin()

    def _path(self) -> str:
        return f"/v1/sessions/{quote(self.session, safe='')}"


def _checked(status: int, content: Any) -> dict[str, Any]:
    if status in (200, 202) and isinstance(content, dict):
        return content
    if isinstance(content, dict) and "error" in content:
        raise LaunchError(f"{status}: {words_of(content)}")
    raise LaunchError(NO_SESSIONS)


class Screen:
    """Writes answers to standard output and all else to standard error."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet

    def piece(self, text: str) -> None:
        """Show a piece of an answer. Control characters in it have no effect."""
        sys.stdout.write(safe(text))
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()

    def note(self, text: str, style: str = "dim") -> None:
        """Show something that is not part of the chat."""
        if not self._quiet:
            self._notes.print(Text(safe(text), style=style))

    def error(self, text: str) -> None:
        self._notes.print(Text(f"error: {safe(text)}", style="red"))

    def turn(self, turn: RemoteTurn, session: dict[str, Any] | None, was_hot: bool = True) -> None:
        """Show in a line where the prompt's KV came from, how fast it was, and the session.

        ``was_hot``: the session was hot before the turn. If it was not, hot KV that the turn reused
        is that of another session.
        """
        style = _STYLES.get(turn.source, "cyan")
        words = [*_turn_words(turn, was_hot), *_session_words(session)]
        self.note(" · ".join(words), style)

    def session(self, session: dict[str, Any] | None, name: str) -> None:
        words = _session_words(session) or [f"{name}: the server does not know it yet"]
        self.note(" · ".join(words))


def _turn_words(turn: RemoteTurn, was_hot: bool) -> list[str]:
    words = [] if turn.source == UNKNOWN else [turn.source]
    if turn.source == "hot" and not was_hot:
        words = ["hot, of another session that begins the same"]
    if turn.cached_tokens is not None and turn.prompt_tokens:
        words.append(f"{turn.cached_tokens} of {turn.prompt_tokens} tokens reused")
    if turn.reason:
        words.append(f"{'because' if turn.source == MISS else 'not more'}: {turn.reason}")
    if turn.ttft_s is not None:
        words.append(f"first token {turn.ttft_s:.2f} s")
        rest = turn.total_s - turn.ttft_s
        if rest > 0 and turn.answer_tokens > 1:
            words.append(f"{(turn.answer_tokens - 1) / rest:.0f} tok/s")
    return words


def _session_words(session: dict[str, Any] | None) -> list[str]:
    """Return the parts of the line on a session. Fields may be missing: versions differ."""
    if not session:
        return []
    words = [f"session {session.get('id')} is {session.get('state')}"]
    if session.get("tier"):
        words.append(f"cold copy in {session['tier']}")
    if session.get("tokens"):
        size = f" in {show_bytes(session['bytes'])}" if session.get("bytes") else ""
        words.append(f"{session['tokens']} tokens{size}")
    if float(session.get("idle_s") or 0) >= 1:
        words.append(f"quiet for {show_duration(round(float(session['idle_s']), 1))}")
    if session.get("pinned"):
        words.append("pinned")
    return words


class Quit(Exception):
    """The user wants to leave."""


async def run_command(line: str, talk: Talk, screen: Screen) -> None:
    """Run a line that is a command, such as ``/sleep``.

    Raises:
        Quit: the command is ``/quit``.
        LaunchError: the server refused; the message is the server's.
    """
    match line.split()[0].lower():
        case "/sleep" | "/wake" | "/pin" | "/unpin" as name:
            screen.session(await talk.act(_VERBS[name]), talk.session)
        case "/info":
            screen.session(await talk.look(), talk.session)
        case "/forget":
            old = talk.session
            await talk.forget()
            screen.note(f"{old} is forgotten; this is {talk.session}")
        case "/new":
            talk.begin()
            screen.note(f"a new conversation: session {talk.session}")
        case "/quit" | "/exit":
            raise Quit
        case "/help":
            for name, text in HELP.items():
                screen.note(f"{name:<8} {text}")
        case name:
            screen.error(f"there is no {name}; there are: {', '.join(HELP)}")


def chat(address: Address, options: ChatOptions) -> int:
    """Chat until the end of input; return the exit code: 1 if input is a pipe and a turn failed.

    Raises:
        UsageError, LaunchError: the server cannot be used; says why.
    """
    screen, read = Screen(quiet=options.quiet), reader()
    with asyncio.Runner() as runner:
        http = runner.run(_http())
        try:
            model = runner.run(address.model(http, options.model))
            talk = Talk(http, address, model, options)
            screen.note(f"{model} at {address.base}, session {talk.session}; /help lists commands")
            return _loop(runner, talk, screen, read)
        finally:
            runner.run(http.close())


async def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"user-agent": "thermocline"})


def reader() -> Callable[[], str | None]:
    """Return a function that returns the next line of input, or None at its end."""
    if sys.stdin is None:  # the parent process closed it
        return lambda: None
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        return lambda: sys.stdin.readline(MOST_CHARACTERS) or None
    with contextlib.suppress(ImportError):  # a Python without it still reads lines
        import readline  # noqa: F401 - gives input() a history and keys for editing

    def ask() -> str | None:
        try:
            return f"{input(PROMPT)}\n"
        except EOFError:
            return None

    return ask


def _loop(
    runner: asyncio.Runner, talk: Talk, screen: Screen, read: Callable[[], str | None]
) -> int:
    failed = 0
    while True:
        try:
            line = read()
        except KeyboardInterrupt:  # Ctrl-C at the prompt ends the chat
            line = None
        if line is None:
            return 0 if sys.stdin and sys.stdin.isatty() else failed
        try:
            failed |= runner.run(_line(line.strip(), talk, screen))
        except KeyboardInterrupt:
            screen.end()
            screen.note("stopped; the session is as it was before this message")
        except Quit:
            return failed
        except LaunchError as error:
            screen.error(str(error))
            failed = 1


def _is_text(line: str) -> bool:
    try:
        line.encode()
    except UnicodeEncodeError:  # bytes that the reader could not decode
        return False
    return True


async def _line(line: str, talk: Talk, screen: Screen) -> int:
    """Send a line or run it as a command; return 1 if its turn failed, else 0."""
    if not line:
        return 0
    if not _is_text(line):
        raise LaunchError(f"this line is not text in {sys.stdin.encoding}, and was not sent")
    if line.startswith("/") and not line.startswith("//"):
        await run_command(line, talk, screen)
        return 0
    before = await talk.look()
    turn = await talk.ask(line.removeprefix("/") if line[0] == "/" else line, screen.piece)
    if turn.text:
        screen.end()
    if not turn.ok:
        screen.error(f"{turn.status}: {turn.error}" if turn.status else turn.error)
        return 1
    screen.turn(turn, await talk.look(), (before or {}).get("state") in HOT)
    return 0
