"""Writes Anthropic's tools and tool choice as a chat's.

Tools that a client runs itself have a name and an input schema. Tools that Anthropic's servers
would run (web search and the like) have none: they are left out and counted.
"""

from __future__ import annotations

from engines.openai.errors import InvalidRequest
from engines.openai.requests import Json
from gateway.anthropic.request import CountRequest, ToolChoice


def chat_tools(request: CountRequest) -> tuple[list[Json], int]:
    """Return the tools of a chat, and how many were left out.

    Raises:
        InvalidRequest: a tool has no name or schema that could be used.
    """
    tools = request.tools or []
    ours = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools) if _is_the_clients(tool)]
    return ours, len(tools) - len(ours)


def _is_the_clients(tool: Json) -> bool:
    return tool.get("type") in (None, "custom")


def _tool(tool: Json, where: str) -> Json:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise InvalidRequest(f"{where}: a tool needs a name and an input_schema", where)
    function: Json = {"name": name, "parameters": schema}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def chat_tool_choice(choice: ToolChoice | None, tools: list[Json]) -> Json:
    """Return the fields of a chat that say which tools may or must be called.

    Raises:
        InvalidRequest: a tool is to be called, and there is none that could be.
    """
    if choice is None:
        return {}
    if not tools:
        if choice.type in ("any", "tool"):
            raise InvalidRequest("tool_choice: there are no tools that could be called.", "tools")
        return {}
    fields: Json = {"tool_choice": _CHOICES.get(choice.type)}
    if choice.type == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
