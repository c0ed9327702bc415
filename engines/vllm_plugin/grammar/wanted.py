"""Reads from the body of a request which grammars vLLM would compile for it."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from engines.openai.schemas.enforceable import enforceable

Kind = Literal["json", "regex", "grammar", "tag"]


class WantedGrammar(msgspec.Struct, frozen=True):
    """One grammar that vLLM would compile for a request."""

    kind: Kind
    text: str
    param: str  # the field that asks for it


class _Function(msgspec.Struct):
    name: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function | None = None


class _Asked(msgspec.Struct):
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None


def wanted_by(body: bytes) -> list[WantedGrammar]:
    """List the grammars of a request; [] for a request that vLLM will refuse as malformed."""
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, RecursionError):
        return []
    wanted = _of_tools(asked)
    wanted += _of_format(asked.response_format or {})
    for name, value in (asked.structured_outputs or {}).items():
        wanted += _of_field(name, value)
    return wanted


def for_calls(schema: Any) -> Any:
    """Return a copy of the schema of a call's arguments as xgrammar can enforce it in little time.

    It has no bounds on the lengths of strings, and no keywords that cannot be enforced.
    """
    return enforceable(schema, "xgrammar") if isinstance(schema, dict) else schema


def _of_tools(asked: _Asked) -> list[WantedGrammar]:
    """List the grammar of calls that are forced, or strict: see ``process.forced_calls``."""
    functions = [x.function for x in asked.tools or [] if x.function is not None]
    is_free = asked.tool_choice in (None, "auto")
    held = [x for x in functions if not is_free or x.strict]
    if not held or asked.tool_choice == "none":
        return []
    # Similar to vLLM's own tag for most families; the schemas take most of the time.
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>{{"name": "{x.name}", "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": True if x.parameters is None else for_calls(x.parameters),
            },
            "end": "}</tool_call>",
        }
        for x in held
    ]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": True}
    return [WantedGrammar("tag", json.dumps({"type": "structural_tag", "format": calls}), "tools")]


def _of_format(wanted: dict[str, Any]) -> list[WantedGrammar]:
    if wanted.get("type") == "structural_tag":
        return [WantedGrammar("tag", json.dumps(wanted), "response_format")]
    schema = wanted.get("json_schema")
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return [WantedGrammar("json", json.dumps(schema["schema"]), "response_format")]
    return []


def _of_field(name: str, value: Any) -> list[WantedGrammar]:
    """Read a field of vLLM's own ``structured_outputs``."""
    param = f"structured_outputs.{name}"
    if name == "json" and isinstance(value, dict | str):
        text = value if isinstance(value, str) else json.dumps(value)
        return [WantedGrammar("json", text, param)]
    if name == "choice" and isinstance(value, list):
        choices = " | ".join(json.dumps(str(x)) for x in value)
        return [WantedGrammar("grammar", f"root ::= {choices}", param)]
    if isinstance(value, str) and value:
        kinds: dict[str, Kind] = {"regex": "regex", "grammar": "grammar", "structural_tag": "tag"}
        if kind := kinds.get(name):
            return [WantedGrammar(kind, value, param)]
    return []
