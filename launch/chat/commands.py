"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from launch.chat.screen import Screen
from launch.chat.talk import Talk

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
