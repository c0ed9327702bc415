"""Reads a model's configuration and chat template, and chooses vLLM's parsers and template.

vLLM takes the names of the parsers for tool calls and reasoning when it starts. Without a tool
parser it refuses every request with ``tools``. A model writes its calls as its chat template shows
them, so strings in the template decide the parser; where families share those strings, the model's
type decides. The names are those of the pinned vLLM; a test in its environment looks up each.

A wrapped template receives the tools as text in the system message; earlier calls and their
results are plain text, too. Chats without tools are not changed. Calls are written in the format
that the parser ``USUAL`` parses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

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


# The format that ChatML models were trained to write, and that ``with_tools`` asks for.
USUAL: Final = "hermes"


class Parsers(NamedTuple):
    """The names of a model's parsers; "" = none."""

    tool_calls: str
    reasoning: str


class _Sign(NamedTuple):
    """Recognises a model's family by its type, by strings in its template, or by both."""

    parser: str
    marks: tuple[str, ...] = ()  # strings that the template must have, all of them
    model_types: tuple[str, ...] = ()  # beginnings of types; () = any

    def fits(self, files: ModelFiles) -> bool:
        of_type = not self.model_types or files.model_type.startswith(self.model_types)
        return of_type and all(x in files.template for x in self.marks)


# The first match decides, so specific signs come before those that several families share.
_TOOL_CALLS: Final = (
    _Sign("openai", model_types=("gpt_oss",)),
    _Sign("deepseek_v41", model_types=("deepseek_v41",)),
    _Sign("deepseek_v4", model_types=("deepseek_v4",)),
    _Sign("deepseek_v32", ("｜DSML｜",)),
    _Sign("deepseek_v32", model_types=("deepseek_v32",)),
    _Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Sign("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    _Sign("kimi_k3", model_types=("kimi_k3",)),
    _Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Sign("glm45", ("<arg_key>",), ("glm4_moe", "glm4v_moe")),
    _Sign("glm47", ("<arg_key>",)),
    _Sign("minimax_m3", model_types=("minimax_m3",)),
    _Sign("minimax_m2", ("<minimax:tool_call>",)),
    _Sign("longcat", ("<longcat_tool_call>",)),
    _Sign("gemma4", ("<|tool_call>",)),
    _Sign("functiongemma", ("<start_function_call>",)),
    _Sign("seed_oss", ("<seed:tool_call>",)),
    _Sign("lfm2", ("<|tool_call_start|>",)),
    _Sign("cohere_command4", model_types=("cohere_command4",)),
    _Sign("cohere_command3", ("<|START_ACTION|>",)),
    _Sign("granite4", model_types=("granitemoehybrid",)),
    _Sign("granite", ("<|tool_call|>",), ("granite",)),
    _Sign("phi4_mini_json", ("<|tool|>",)),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("llama4_pythonic", model_types=("llama4",)),
    _Sign("llama3_json", ("ipython",)),
    _Sign("olmo3", ("<functions>",), ("olmo",)),
    _Sign("hunyuan_a13b", ("<tool_calls>",), ("hunyuan",)),
    _Sign("jamba", ("<tool_calls>",), ("jamba",)),
    _Sign("internlm", ("<|plugin|>",)),
    _Sign("ernie45", model_types=("ernie4_5",)),
    _Sign("step3p5", model_types=("step3p5",)),
    _Sign("step3", model_types=("step3",)),
    _Sign("mimo", ("<tool_call>",), ("mimo",)),
    _Sign("qwen3_xml", ("<tool_call>\n<function=",)),
    _Sign("qwen3_xml", ("<tool_call>\\n<function=",)),
    _Sign("apertus", model_types=("apertus",)),
    _Sign(USUAL, ("<tool_call>",)),
)
_REASONING: Final = (
    _Sign("openai_gptoss", model_types=("gpt_oss",)),
    _Sign("deepseek_v41", model_types=("deepseek_v41",)),
    _Sign("deepseek_v4", model_types=("deepseek_v4",)),
    _Sign("deepseek_r1", ("'<｜Assistant｜><think>\\n'",)),
    _Sign("deepseek_v3", ("thinking",), ("deepseek_v3",)),
    _Sign("kimi_k3", model_types=("kimi_k3",)),
    _Sign("kimi_k2", ("<think>",), ("kimi_k2",)),
    _Sign("glm45", ("<think>",), ("glm4_moe", "glm4v_moe")),
    _Sign("glm47", ("<think>",), ("glm",)),
    _Sign("minimax_m3", model_types=("minimax_m3",)),
    _Sign("minimax_m2", ("<think>",), ("minimax",)),
    _Sign("gemma4", ("<|channel>",)),
    _Sign("seed_oss", ("<seed:think>",)),
    _Sign("mistral", ("[THINK]",)),
    _Sign("cohere_command4", model_types=("cohere_command4",)),
    _Sign("cohere_command3", ("<|START_THINKING|>",)),
    _Sign("nemotron_v3", ("<think>",), ("nemotron",)),
    _Sign("olmo3", ("<think>",), ("olmo",)),
    _Sign("hunyuan_a13b", ("<think>",), ("hunyuan",)),
    _Sign("ernie45", ("<think>",), ("ernie4_5",)),
    _Sign("step3p5", ("<think>",), ("step3p5",)),
    _Sign("step3", ("<think>",), ("step3",)),
    _Sign("mimo", ("<think>",), ("mimo",)),
    _Sign("qwen3", ("<think>",), ("qwen", "smollm3", "bailing")),
    _Sign("qwen3", ("enable_thinking",)),
)
TOOL_CALL_PARSERS: Final = frozenset(x.parser for x in _TOOL_CALLS)
REASONING_PARSERS: Final = frozenset(x.parser for x in _REASONING)


def parsers_for(files: ModelFiles) -> Parsers:
    """Choose a model's parsers, by its family.

    A model that no sign fits is assumed to write its calls in the ``USUAL`` format.
    """
    return Parsers(_first(_TOOL_CALLS, files) or USUAL, _first(_REASONING, files))


def needs_tool_template(files: ModelFiles, chosen: Parsers) -> bool:
    """True if the chat template does not handle tools, and ``with_tools`` can add them."""
    return bool(chosen.tool_calls == USUAL and files.template and "tools" not in files.template)


def _first(signs: tuple[_Sign, ...], files: ModelFiles) -> str:
    return next((x.parser for x in signs if x.fits(files)), "")
