"""Holds the arguments of forced tool calls to their schema, as our other engines do.

    --tool-parser-plugin engines.vllm_plugin.process.forced_calls

vLLM holds the arguments of a call that a request forces (``tool_choice`` required, or naming a
function) to nothing but JSON where its parser knows the model's own way of writing calls, unless
each function says ``strict``. That word would be a part of the prompt, and a forced call in the
middle of a conversation would cost all that was computed for it. So the parsers are extended: with
a forced call they ask for what ``strict`` asks for, and prompts stay as they are. Only lengths of
texts are not held to: xgrammar takes up to two seconds of a core for each.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from engines.vllm_plugin.grammar.wanted import without_lengths

_FREE = (None, "auto", "none")
# vLLM's own parsers: names, and where each is. They are read when one is asked for.
_VLLMS = dict(ToolParserManager.lazy_parsers)


def _without_lengths(request: Any) -> Any:
    """Return a copy of a request whose functions say nothing of the lengths of texts."""
    tools = []
    for tool in request.tools:
        function = getattr(tool, "function", None)
        if function is not None and function.parameters is not None:
            loose = function.model_copy(update={"parameters": without_lengths(function.parameters)})
            tool = tool.model_copy(update={"function": loose})
        tools.append(tool)
    return request.model_copy(update={"tools": tools})


def held_to_schema(parser: type[ToolParser]) -> type[ToolParser]:
    """Extend a parser; one without a grammar for calls of its own holds them to the schema."""
    if parser.structural_tag_model is None:
        return parser

    class Held(parser):  # type: ignore[misc]
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
                _without_lengths(request), reasoning=reasoning, strict_level=strict_level
            )

    Held.__name__ = parser.__name__
    return Held


def __getattr__(name: str) -> type[ToolParser]:
    """Find an extended parser by the name that vLLM knows it by."""
    if name not in _VLLMS:
        raise AttributeError(name)
    module, wanted = _VLLMS[name]
    return held_to_schema(getattr(importlib.import_module(module), wanted))


for _name in _VLLMS:
    ToolParserManager.register_lazy_module(_name, __name__, _name)
