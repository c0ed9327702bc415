"""Shows a chat: answers as they come on standard output, all else on standard error.

So a pipe that reads the chat gets the answers alone.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from launch.remote.turn import MISS, UNKNOWN, Turn
from launch.settings.units import show_bytes, show_duration

_STYLES = {"hot": "green", "miss": "yellow", "unknown": "dim"}


class Screen:
    """The user's terminal, or what stands in its place."""

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

    def turn(self, turn: Turn, session: dict[str, Any] | None) -> None:
        """Show in a line where the prompt's KV came from, how fast it was, and the session."""
        style = _STYLES.get(turn.source, "cyan")
        self.note(" · ".join([*_turn_words(turn), *_session_words(session)]), style)

    def session(self, session: dict[str, Any] | None, name: str) -> None:
        words = _session_words(session) or [f"{name}: the server does not know it yet"]
        self.note(" · ".join(words))


def safe(text: str) -> str:
    """Replace the control characters of ``text`` that a terminal would obey."""
    return "".join(x if x.isprintable() or x in "\n\t" else "?" for x in text)


def _turn_words(turn: Turn) -> list[str]:
    words = [] if turn.source == UNKNOWN else [turn.source]
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
    """Words for the server's report of a session; the server may be of another version."""
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
