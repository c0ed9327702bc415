"""Finds the tool calls in an answer's text.

Three ways in which models write them, one reader for each:

- ``MarkedCalls``: between the markers that the model was trained on, in whatever syntax mlx_lm has
  a parser for;
- ``LineCalls``: our own grammar's (``grammar.grammar_source``): one JSON object per line,
  ``{"name": ..., "arguments": ...}``, whose arguments are passed on as they are generated;
- ``BareCalls``: the same JSON, in any spelling, from a model that was only asked to use it.

What does not parse, or names a function that nobody offered, is shown as the text that it is.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.mlx_worker.grammar import call_header

# What other people's parsers raise for text that they do not understand.
_NOT_A_CALL = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True)
class CallPart:
    """A piece of call number ``index``. The first piece has the name, later ones arguments."""

    index: int
    name: str = ""
    id: str = ""
    arguments: str = ""


@dataclass
class Found:
    """What a reader made of some text, in the order in which it is to be shown."""

    content: str = ""
    parts: list[CallPart] = field(default_factory=list)


class CallReader(Protocol):
    num_calls: int

    def feed(self, section: str, text: str) -> Found:
        """``section`` is the state of mlx_lm's text machine: ``tool`` between markers."""

    def finish(self) -> Found:
        """The answer is over."""


class NoCalls:
    """No tools were offered: everything is content."""

    num_calls = 0

    def feed(self, section: str, text: str) -> Found:
        return Found(text)

    def finish(self) -> Found:
        return Found()


class MarkedCalls:
    def __init__(
        self,
        parse: Callable[[str, Any], Any],
        tools: Sequence[dict[str, Any]],
        markers: tuple[str, str],
    ) -> None:
        self._parse = parse
        self._tools = tools
        self._names = {tool["function"]["name"] for tool in tools}
        self._markers = markers
        self._inside = False
        self._text = ""
        self.num_calls = 0

    def feed(self, section: str, text: str) -> Found:
        if section == "tool":
            self._inside = True
            self._text += text
            return Found()
        found = self.finish()
        # Line breaks between calls are no answer.
        if text.strip() or not self.num_calls:
            found.content += text
        return found

    def finish(self) -> Found:
        if not self._inside:
            return Found()
        text, self._text, self._inside = self._text, "", False
        try:
            parsed = self._parse(text, self._tools)
            calls = _checked(parsed, self._names)
        except (*_NOT_A_CALL, SyntaxError):
            return Found(text.join(self._markers))
        found = Found(parts=_parts(calls, self.num_calls))
        self.num_calls += len(calls)
        return found


class BareCalls:
    """Holds an answer back if it begins like JSON, until its end tells what it is."""

    _OPENINGS = ("{", "[", "```", "<tool_call>")
    _WRAPPING = re.compile(r"^(?:```(?:json)?|<tool_call>)\s*|\s*(?:```|</tool_call>)$")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._plain = False
        self.num_calls = 0

    def feed(self, section: str, text: str) -> Found:
        if self._plain:
            return Found(text)
        self._held += text
        start = self._held.lstrip()
        if not start or any(start.startswith(x) or x.startswith(start) for x in self._OPENINGS):
            return Found()
        self._plain = True
        return Found(self._held)

    def finish(self) -> Found:
        if self._plain:
            return Found()
        try:
            calls = _checked(json.loads(self._WRAPPING.sub("", self._held.strip())), self._names)
        except _NOT_A_CALL:
            return Found(self._held)
        self.num_calls = len(calls)
        return Found(parts=_parts(calls, 0))


class LineCalls:
    """The grammar leaves no doubt, so arguments are passed on while they are being written."""

    def __init__(self, names: Collection[str]) -> None:
        self._headers = {call_header(name): name for name in names}
        self._held = ""
        self._calling = False
        self._plain = False
        self.num_calls = 0

    def feed(self, section: str, text: str) -> Found:
        self._held += text
        found = Found()
        while self._step(found):
            pass
        return found

    def finish(self) -> Found:
        """A call that was cut short keeps the arguments that it has, as at OpenAI."""
        text, self._held = self._held, ""
        if self._calling:
            return Found(parts=self._arguments(text.removesuffix("}")))
        return Found(text)

    def _step(self, found: Found) -> bool:
        """Settle a stretch of the held text; False = more text is needed."""
        if self._plain:
            found.content += self._held
            self._held = ""
            return False
        if self._calling:
            return self._pass_arguments(found)
        return self._begin(found)

    def _begin(self, found: Found) -> bool:
        header = next((x for x in self._headers if self._held.startswith(x)), None)
        if header is None:
            self._plain = not any(x.startswith(self._held) for x in self._headers)
            return self._plain
        self._held = self._held[len(header) :]
        self._calling = True
        found.parts.append(CallPart(self.num_calls, self._headers[header], _call_id()))
        self.num_calls += 1
        return True

    def _pass_arguments(self, found: Found) -> bool:
        """All but the last character, which may be the brace that closes the call."""
        line, end, rest = self._held.partition("\n")
        if end:
            found.parts += self._arguments(line.removesuffix("}"))
            self._held, self._calling = rest, False
            return True
        found.parts += self._arguments(line[:-1])
        self._held = line[-1:]
        return False

    def _arguments(self, text: str) -> list[CallPart]:
        return [CallPart(self.num_calls - 1, arguments=text)] if text else []


def _checked(parsed: Any, names: Collection[str]) -> list[dict[str, Any]]:
    """Parsed calls, one or several. Raises ``ValueError`` if they are no calls of ``names``."""
    calls = parsed if isinstance(parsed, list) else [parsed]
    checked = [_call(x.get("function", x), names) for x in calls]
    if not checked:
        raise ValueError("no calls")
    return checked


def _call(call: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    # Llama's models say "parameters".
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if call["name"] not in names or not isinstance(arguments, dict):
        raise ValueError("not a call of a known function")
    return {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}


def _parts(calls: Sequence[dict[str, Any]], first: int) -> list[CallPart]:
    """Name first and arguments second, as OpenAI streams them."""
    parts = []
    for index, call in enumerate(calls, first):
        parts.append(CallPart(index, call["name"], _call_id()))
        parts.append(CallPart(index, arguments=call["arguments"]))
    return parts


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
