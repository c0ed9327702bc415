"""Wraps a chat template that does not handle tools, so that its model can be offered tools.

The wrapped template receives the tools as text in the system message; earlier calls and their
results are plain text, too. Chats without tools are not changed. Calls are written in the format
that the parser ``parsers.USUAL`` reads.
"""

from __future__ import annotations

from typing import Final

# The last tag prints nothing. It is there because Jinja removes the newline that follows any other
# kind of tag.
_BEFORE: Final = """\
{%- if tools
       or messages | selectattr("role", "equalto", "tool") | list
       or messages | selectattr("tool_calls", "defined") | selectattr("tool_calls") | list -%}
{%- set ours = namespace(messages=[], about="") -%}
{%- if tools -%}
{%- set ours.about = "You can call these functions:\\n" -%}
{%- for tool in tools -%}
{%- set ours.about = ours.about ~ (tool.function | tojson) ~ "\\n" -%}
{%- endfor -%}
{%- set ours.about = ours.about ~ "To call a function, answer with nothing but "
    ~ '<tool_call>{"name": "its name", "arguments": {"argument": "value"}}</tool_call>'
    ~ "\\nOtherwise answer as usual." -%}
{%- if messages[0].role != "system" -%}
{%- set ours.messages = [{"role": "system", "content": ours.about}] -%}
{%- set ours.about = "" -%}
{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
{%- if loop.first and ours.about -%}
{%- set about = {"role": "system", "content": message.content ~ "\\n\\n" ~ ours.about} -%}
{%- set ours.messages = ours.messages + [about] -%}
{%- elif message.role == "tool" -%}
{%- set said = "Result of " ~ (message.name or "the function") ~ ": " ~ message.content -%}
{%- set ours.messages = ours.messages + [{"role": "user", "content": said}] -%}
{%- elif message.tool_calls -%}
{%- set call = namespace(lines=[message.content] if message.content else []) -%}
{%- for one in message.tool_calls -%}
{%- set name, arguments = one.function.name, one.function.arguments -%}
{%- set line = {"name": name, "arguments": arguments} | tojson -%}
{%- set call.lines = call.lines + ["<tool_call>" ~ line ~ "</tool_call>"] -%}
{%- endfor -%}
{%- set said = {"role": message.role, "content": call.lines | join("\\n")} -%}
{%- set ours.messages = ours.messages + [said] -%}
{%- else -%}
{%- set ours.messages = ours.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = ours.messages -%}
{%- endif -%}
{{- "" }}"""


def with_tools(template: str) -> str:
    """Return a chat template that shows tools to the model, then continues with ``template``."""
    return _BEFORE + template
