"""The loop of a chat: reads a line, sends it or carries it out, shows the answer.

Standard input may be a pipe; each of its lines is a message then.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from launch.chat.screen import Screen
from launch.chat.talk import Talk
from launch.errors import LaunchError
from launch.remote.address import Address

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
MOST_CHARACTERS = 1 << 20  # of a line


class Quit(Exception):
    """The user wants to leave."""


async def obey(line: str, talk: Talk, screen: Screen) -> None:
    """Carry out a command.

    Raises:
        Quit: leave the chat.
        LaunchError: the server did not follow; in its own words.
    """
    name = line.split()[0].lower()
    if name in _VERBS:
        screen.session(await talk.act(_VERBS[name]), talk.session)
    elif name in _OTHERS:
        await _OTHERS[name](talk, screen)
    else:
        screen.error(f"there is no {name}; there are: {', '.join(HELP)}")


async def _info(talk: Talk, screen: Screen) -> None:
    screen.session(await talk.look(), talk.session)


async def _forget(talk: Talk, screen: Screen) -> None:
    old = talk.session
    await talk.forget()
    screen.note(f"{old} is forgotten; this is {talk.session}")


async def _new(talk: Talk, screen: Screen) -> None:
    talk.begin()
    screen.note(f"a new conversation: session {talk.session}")


async def _quit(talk: Talk, screen: Screen) -> None:
    raise Quit


async def _help(talk: Talk, screen: Screen) -> None:
    for name, text in HELP.items():
        screen.note(f"{name:<8} {text}")


_OTHERS: Final[Mapping[str, Callable[[Talk, Screen], Awaitable[None]]]] = {
    "/info": _info,
    "/forget": _forget,
    "/new": _new,
    "/quit": _quit,
    "/exit": _quit,
    "/help": _help,
}


@dataclass(frozen=True)
class ChatOptions:
    """The wishes of the command line; "" and 0 = the server's own."""

    model: str = ""
    session: str = ""
    system: str = ""
    max_tokens: int = 0
    temperature: float | None = None
    quiet: bool = False


def chat(address: Address, options: ChatOptions) -> int:
    """Chat until the end of input; returns the exit code, which is 1 if a turn failed in a pipe.

    Raises:
        UsageError, LaunchError: the server cannot be used; says why.
    """
    screen, read = Screen(quiet=options.quiet), reader()
    with asyncio.Runner() as runner:
        http = runner.run(_http())
        try:
            model = runner.run(address.model(http, options.model))
            talk = Talk(
                http,
                address,
                model,
                session=options.session,
                system=options.system,
                fields=_fields(options),
            )
            screen.note(f"{model} at {address.base}, session {talk.session}; /help lists commands")
            return _loop(runner, talk, screen, read)
        finally:
            runner.run(http.close())


def _fields(options: ChatOptions) -> dict[str, Any]:
    fields = {"max_tokens": options.max_tokens or None, "temperature": options.temperature}
    return {name: value for name, value in fields.items() if value is not None}


async def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


def reader() -> Callable[[], str | None]:
    """A function that reads the next line; None at the end of input."""
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
        except KeyboardInterrupt:  # at the prompt it means: leave
            line = None
        if line is None:
            return failed if not sys.stdin.isatty() else 0
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


async def _line(line: str, talk: Talk, screen: Screen) -> int:
    """Take one line; 1 if its turn failed."""
    if not line:
        return 0
    if line.startswith("/") and not line.startswith("//"):
        await obey(line, talk, screen)
        return 0
    turn = await talk.ask(line.removeprefix("/") if line[0] == "/" else line, screen.piece)
    if turn.text:
        screen.end()
    if not turn.ok:
        screen.error(f"{turn.status}: {turn.error}" if turn.status else turn.error)
        return 1
    screen.turn(turn, await talk.look())
    return 0
