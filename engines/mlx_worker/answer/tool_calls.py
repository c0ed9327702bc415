"""Finds the tool calls in an answer's text.

There is one reader for each of three ways in which models write them:

- ``MarkedCalls``: between the markers that the model was trained on, in any syntax that mlx_lm
  parses;
- ``LineCalls``: as our grammar enforces them (``engines.host.grammar.source_of``), one JSON object
  per line, ``{"name": ..., "arguments": ...}``; arguments are passed on as they are generated;
- ``BareCalls``: such JSON in any formatting, from a model that was only asked to write it.

Text that does not parse, or names a function that was not offered, is shown as content.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.host.grammar import call_header

# The errors that mlx_lm's parsers raise for text that they do not understand.
_NOT_A_CALL = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True)
class CallDelta:
    """A part of call number ``index``; the first delta has the name, later ones the arguments."""

    index: int
    name: str = ""
    id: str = ""
    arguments: str = ""


@dataclass
class ParsedText:
    """The content and calls that a reader found in some text; the content is shown first."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class CallReader(Protocol):
    """Finds the tool calls in one answer."""

    num_calls: int  # found so far
    is_cut: bool  # True if the answer ended within the last call

    def feed(self, section: str, text: str) -> ParsedText:
        """Take more of the answer; return the content and calls that are certain by now.

        ``section`` is the state of mlx_lm's text machine, ``tool`` between markers.
        """

    def finish(self) -> ParsedText:
        """Return the content and calls that were held back, at the answer's end."""


class MarkedCalls:
    """Reads calls between the model's own markers, with mlx_lm's parser for this model."""

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
        self.is_cut = False  # an incomplete call does not parse, so it is no call
        self._inside = False
        self._text = ""
        self.num_calls = 0

    def feed(self, section: str, text: str) -> ParsedText:
        if section == "tool":
            self._inside = True
            self._text += text
            return ParsedText()
        parsed_text = self.finish()
        # Line breaks between calls are not content.
        if text.strip() or not self.num_calls:
            parsed_text.content += text
        return parsed_text

    def finish(self) -> ParsedText:
        if not self._inside:
            return ParsedText()
        text, self._text, self._inside = self._text, "", False
        try:
            parsed = self._parse(text, self._tools)
            calls = _checked(parsed, self._names)
        except (*_NOT_A_CALL, SyntaxError):
            return ParsedText(text.join(self._markers))
        parsed_text = ParsedText(calls=_deltas(calls, self.num_calls))
        self.num_calls += len(calls)
        return parsed_text


class BareCalls:
    """Reads calls in bare JSON; an answer that begins like JSON is held back until its end."""

    _OPENINGS = ("{", "[", "```", "<tool_call>")
    _WRAPPING = re.compile(r"^(?:```(?:json)?|<tool_call>)\s*|\s*(?:```|</tool_call>)$")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.is_cut = False
        self._held = ""
        self._plain = False
        self.num_calls = 0

    def feed(self, section: str, text: str) -> ParsedText:
        if self._plain:
            return ParsedText(text)
        self._held += text
        start = self._held.lstrip()
        if not start or any(start.startswith(x) or x.startswith(start) for x in self._OPENINGS):
            return ParsedText()
        self._plain = True
        return ParsedText(self._held)

    def finish(self) -> ParsedText:
        if self._plain:
            return ParsedText()
        try:
            calls = _checked(json.loads(self._WRAPPING.sub("", self._held.strip())), self._names)
        except _NOT_A_CALL:
            return ParsedText(self._held)
        self.num_calls = len(calls)
        return ParsedText(calls=_deltas(calls, 0))


class LineCalls:
    """Reads calls that our grammar enforced; arguments are passed on as they are generated."""

    def __init__(self, names: Collection[str]) -> None:
        self._headers = {call_header(name): name for name in names}
        self.is_cut = False
        self._held = ""
        self._calling = False
        self._plain = False
        self.num_calls = 0

    def feed(self, section: str, text: str) -> ParsedText:
        self._held += text
        parsed_text, goes_on = ParsedText(), True
        while goes_on and not self._plain:
            step = self._pass_arguments if self._calling else self._begin
            goes_on = step(parsed_text)
        if self._plain:
            parsed_text.content, self._held = self._held, ""
        return parsed_text

    def finish(self) -> ParsedText:
        """Return the rest; a call that was cut short keeps its arguments so far, as at OpenAI."""
        text, self._held = self._held, ""
        self.is_cut = self._calling and not text.endswith("}")
        if self._calling:
            return ParsedText(calls=self._arguments(text.removesuffix("}")))
        return ParsedText(text)

    def _begin(self, parsed_text: ParsedText) -> bool:
        """Read a call's header in the held text; return False if more text is needed."""
        header = next((x for x in self._headers if self._held.startswith(x)), None)
        if header is None:
            self._plain = not any(x.startswith(self._held) for x in self._headers)
            return self._plain
        self._held = self._held[len(header) :]
        self._calling = True
        parsed_text.calls.append(CallDelta(self.num_calls, self._headers[header], _call_id()))
        self.num_calls += 1
        return True

    def _pass_arguments(self, parsed_text: ParsedText) -> bool:
        """Pass on arguments, except the last character, which may be the call's closing brace.

        Returns:
            True if the call has ended and text of the next one may be held.
        """
        line, end, rest = self._held.partition("\n")
        if end:
            parsed_text.calls += self._arguments(line.removesuffix("}"))
            self._held, self._calling = rest, False
            return True
        parsed_text.calls += self._arguments(line[:-1])
        self._held = line[-1:]
        return False

    def _arguments(self, text: str) -> list[CallDelta]:
        return [CallDelta(self.num_calls - 1, arguments=text)] if text else []


def _checked(parsed: Any, names: Collection[str]) -> list[dict[str, Any]]:
    """Return parsed calls in one form. Raises ``ValueError`` if one is not a call of ``names``."""
    checked = []
    for one in parsed if isinstance(parsed, list) else [parsed]:
        call = one.get("function", one)
        # Llama models write "parameters".
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if call["name"] not in names or not isinstance(arguments, dict):
            raise ValueError("not a call of a known function")
        written = json.dumps(arguments, ensure_ascii=False)
        checked.append({"name": call["name"], "arguments": written})
    if not checked:
        raise ValueError("no calls")
    return checked


def _deltas(calls: Sequence[dict[str, Any]], first: int) -> list[CallDelta]:
    """Return the deltas of calls, numbered from ``first``: a name, then arguments, as OpenAI's."""
    deltas = []
    for index, call in enumerate(calls, first):
        deltas.append(CallDelta(index, call["name"], _call_id()))
        deltas.append(CallDelta(index, arguments=call["arguments"]))
    return deltas


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
