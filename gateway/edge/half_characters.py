r"""Half characters in a body of JSON: replaced in calls and results of tools, refused elsewhere.

A program that cuts text by UTF-16 cuts some characters in two, and writes one half as ``\ud83d``: a
lone surrogate, which is no text. A client sends a tool's result, and the call that the model made,
again at every turn to come, so that refusing it would end the conversation.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from engines.openai.errors import InvalidRequest
from engines.openai.requests import Json, parse_json

REPLACED_HEADER: Final = "x-thermocline-replaced"
NUM_REPLACED: Final = "num_replaced"  # where the scope's state has it
_REPLACEMENT: Final = "\ufffd".encode()
_HINT: Final = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Escapes one after the other, so that an escaped backslash is not taken for the next one's.
_ESCAPE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # both halves
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf])"
    rb"|\\.",
    re.DOTALL,
)
_LISTS: Final = ("messages", "input", "items")  # where they are, in each dialect
_BLOCKS: Final = {"tool_result": "content", "tool_use": "input"}  # Anthropic's, and their fields


class WholeText(NamedTuple):
    """A parsed body, and how many half characters were replaced in it."""

    json: Json
    num_replaced: int = 0


def parse_whole(body: bytes) -> WholeText:
    """Parse a body as ``parse_json`` does, but for half characters in calls and results of tools.

    Raises:
        InvalidRequest: also for one elsewhere; it names the field.
    """
    try:
        return WholeText(parse_json(body))
    except InvalidRequest:
        if not _HINT.search(body):
            raise
    mark = f"\ufdd0{secrets.token_hex(2)[:3]}".encode()  # no text has it; as long as an escape
    marked = _ESCAPE.sub(lambda x: mark if x["half"] else x[0], body)
    raw = parse_json(marked)
    num_replaced = sum(_mend(of, name, mark) for of, name in _of_tools(raw))
    for name, value in raw.items():
        rows = enumerate(value) if isinstance(value, list) else ()
        parts = [(f"{name}[{i}]", x) for i, x in rows] or [(name, value)]
        for where, part in parts:
            if mark in msgspec.json.encode([name, part]):
                raise _half(where if mark.decode() not in where else "")
    return WholeText(raw, num_replaced)


def _of_tools(raw: Json) -> Iterator[tuple[Json, str]]:
    """Find what tools gave and were given: an object and the name of its field."""
    rows = [x for name in _LISTS if isinstance(raw.get(name), list) for x in raw[name]]
    for row in rows:
        if not isinstance(row, dict):
            continue
        kind, content = row.get("type"), row.get("content")
        if isinstance(kind, str) and kind.endswith("_call_output"):
            yield row, "output"
        elif row.get("role") in ("tool", "function"):
            yield row, "content"
        elif isinstance(content, list):
            blocks = [x for x in content if isinstance(x, dict)]
            for kind, name in _BLOCKS.items():
                yield from ((x, name) for x in blocks if x.get("type") == kind)


def _mend(of: Json, name: str, mark: bytes) -> int:
    """Replace the marks in a field; returns their number."""
    value: Any = of.get(name)
    written = msgspec.json.encode(value)
    num = written.count(mark)
    if num:
        of[name] = msgspec.json.decode(written.replace(mark, _REPLACEMENT))
    return num


def _half(where: str) -> InvalidRequest:
    message = (
        r"it has half a character (a lone surrogate, as \ud83d), which is no text: leave it out, or"
        " send the whole character"
    )
    return InvalidRequest(f"{where or 'The body'}: {message}.", where or None)
