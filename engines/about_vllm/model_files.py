"""The small files of a model: its family, its chat templates, and tools added to a template.

A wrapped template receives the tools as text in the system message; earlier calls and their
results are plain text, too. Chats without tools are not changed. Calls are written in the format
that the parser ``parsers.USUAL`` reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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


@dataclass(frozen=True)
class ModelFiles:
    """The family of a model, and its chat templates, joined; "" where there is none."""

    model_type: str = ""
    template: str = ""


def read_model_files(folder: Path | None) -> ModelFiles:
    """Read a model's folder in Hugging Face's layout; missing or unreadable parts stay empty."""
    if folder is None:
        return ModelFiles()
    config = _json(folder / "config.json")
    return ModelFiles(str(config.get("model_type") or ""), _template(folder))


def model_folder(path: str) -> Path | None:
    """The folder of a model: a local one, or the one in the hub client's cache of downloads."""
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # the engines depend on it, the gateway does not
        return None
    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _template(folder: Path) -> str:
    """The chat templates: from their own file, else from the tokenizer's settings."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        found = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several by name, one of them for tools
        return "\n".join(str(x.get("template", "")) for x in found if isinstance(x, dict))
    return found if isinstance(found, str) else ""


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def with_tools(template: str) -> str:
    """Return a chat template that shows tools to the model, then continues with ``template``."""
    return _BEFORE + template
