"""Enforces the schema of forced tool calls' arguments, as our other engines do.

    --tool-parser-plugin engines.vllm_plugin.process.forced_calls

A request forces a call if its ``tool_choice`` is required or names a function. If vLLM's parser
knows the model's own format of calls, vLLM only ensures that the arguments of a forced call are
JSON, unless each function sets ``strict``. But ``strict`` would become part of the prompt, so a
forced call in the middle of a conversation would discard all KV computed for it. Instead, for a
forced call, our subclasses of the parsers request the enforcement that ``strict`` gives, and the
prompt does not change. Lengths of strings are not enforced: xgrammar takes up to two seconds of a
core for each. Keywords that its compiler does not enforce are left out, as in every schema
(``openai.schemas``), since vLLM would refuse the request.

A forced call that ``max_tokens`` cuts keeps its arguments so far, as at OpenAI. vLLM's parsers find
it in a stream only, and would show a whole answer with the raw text of the call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from engines.openai.schemas.enforceable import enforceable
from engines.vllm_plugin.grammar.wanted import for_calls

_FREE = (None, "auto", "none")
# vLLM's own parsers: the module and class of each name. A module is imported when it is needed.
_VLLMS = dict(ToolParserManager.lazy_parsers)


def _written(request: Any, write: Callable[[Any], Any]) -> Any:
    """Return a copy of a request in which ``write`` has rewritten the schemas of functions."""
    tools = []
    for tool in request.tools:
        function = getattr(tool, "function", None)
        if function is not None and function.parameters is not None:
            loose = function.model_copy(update={"parameters": write(function.parameters)})
            tool = tool.model_copy(update={"function": loose})
        tools.append(tool)
    return request.model_copy(update={"tools": tools})


def held_to_schema(parser: type[ToolParser]) -> type[ToolParser]:
    """Return a subclass of ``parser`` that enforces the schemas of forced calls."""
    if parser.structural_tag_model is None:
        return _held_as_json(parser)

    class HeldParser(parser):  # type: ignore[misc]
        def get_structural_tag(
            self,
            request: Any,
            *,
            reasoning: bool = False,
            strict_level: ToolStrictLevel = ToolStrictLevel.AUTO,
        ) -> Any:
            if request.tool_choice not in _FREE:
                strict_level = ToolStrictLevel.PARAMETER
            return super().get_structural_tag(
                _written(request, for_calls), reasoning=reasoning, strict_level=strict_level
            )

        def extract_tool_calls(self, model_output: str, request: Any) -> Any:
            found = super().extract_tool_calls(model_output, request)
            if found.tools_called or request.tool_choice in _FREE:
                return found
            return _cut_calls(parser(self.model_tokenizer, self.tools), model_output, request)

    HeldParser.__name__ = parser.__name__
    return HeldParser


def _cut_calls(parser: ToolParser, text: str, request: Any) -> ExtractedToolCallInformation:
    """Read calls, of which the last is not complete, as a stream with one part.

    ``parser``: a new one.
    """
    ids = parser.model_tokenizer.encode(text, add_special_tokens=False)
    read = parser.extract_tool_calls_streaming("", text, text, [], ids, ids, request)
    calls: dict[int, FunctionCall] = {}
    for part in read.tool_calls if read is not None else ():
        call = calls.setdefault(part.index, FunctionCall(name="", arguments=""))
        call.name += part.function.name or ""
        call.arguments += part.function.arguments or ""
    return ExtractedToolCallInformation(
        tools_called=bool(calls),
        tool_calls=[ToolCall(function=x) for x in calls.values()],
        content=read.content if read is not None and calls else text,
    )


def _held_as_json(parser: type[ToolParser]) -> type[ToolParser]:
    """Return a subclass of a parser without a grammar, for which vLLM joins the JSON schemas."""

    class HeldToolParser(parser):  # type: ignore[misc]
        def adjust_request(self, request: Any) -> Any:
            if not request.tools:
                return super().adjust_request(request)
            adjusted = super().adjust_request(_written(request, enforceable))
            outputs = getattr(adjusted, "structured_outputs", None)
            is_own = outputs is getattr(request, "structured_outputs", None)  # the client's
            if outputs is not None and not is_own and isinstance(outputs.json, dict):
                outputs.json = _with_rooted_refs(outputs.json)
            return adjusted.model_copy(update={"tools": request.tools})

    HeldToolParser.__name__ = parser.__name__
    return HeldToolParser


def _with_rooted_refs(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list of calls in which each function's schema is a definition.

    A function's ``$ref`` may name its own root, or its own ``definitions``. vLLM moves only
    ``$defs`` to the root of the list's schema, so that such references would lead nowhere.
    """
    calls = schema.get("items", {}).get("anyOf")
    if not isinstance(calls, list):
        return schema  # the schema of one function
    made, named = [], dict(schema.get("$defs", {}))
    for i, call in enumerate(calls):
        place = f"call-{i}"
        arguments = _moved(call["properties"]["parameters"], place)
        for name, part in arguments.pop("definitions", {}).items():
            named[f"{place}.{name}"] = part
        named[place] = arguments
        inner = {**call["properties"], "parameters": {"$ref": f"#/$defs/{place}"}}
        made.append({**call, "type": "object", "properties": inner})
    return {**schema, "items": {"anyOf": made}, "$defs": named}


def _moved(node: Any, place: str) -> Any:
    if isinstance(node, list):
        return [_moved(x, place) for x in node]
    if not isinstance(node, dict):
        return node
    values = ("const", "enum")
    made = {key: x if key in values else _moved(x, place) for key, x in node.items()}
    ref = made.get("$ref")
    if ref == "#":
        made["$ref"] = f"#/$defs/{place}"
    elif isinstance(ref, str):
        made["$ref"] = ref.replace("#/definitions/", f"#/$defs/{place}.", 1)
    return made


def __getattr__(name: str) -> type[ToolParser]:
    """Find an extended parser by vLLM's name for it."""
    if name not in _VLLMS:
        raise AttributeError(name)
    module, wanted = _VLLMS[name]
    return held_to_schema(getattr(importlib.import_module(module), wanted))


for _name in _VLLMS:
    ToolParserManager.register_lazy_module(_name, __name__, _name)
