"""Fits a chat to its model's template: system messages in its middle, earlier turns' reasoning.

Nothing is moved. System messages at the top instead, as some servers write them, would change the
prompt from its first tokens on: all that was computed for the conversation would be lost at every
such message.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.openai.requests import Json
from engines.wire import TemplateRules

_SYSTEM = ("system", "developer")


def fitted(messages: Sequence[Json], rules: TemplateRules) -> list[Json]:
    """Return the messages as the model's template takes them; none is moved.

    A system message after the first becomes a user's, with a mark. Where the template wants user
    and assistant to alternate, it is added to the message before it, and users' messages that
    follow each other are joined.
    """
    made = list(messages)
    if not rules.inline_system and any(_is_inline(messages, i) for i in range(len(messages))):
        made = _with_notes(messages, rules)
    return made if rules.repeated_users else _alternating(made)


def _with_notes(messages: Sequence[Json], rules: TemplateRules) -> list[Json]:
    made: list[Json] = []
    for i, message in enumerate(messages):
        if not _is_inline(messages, i):
            made.append(message)
            continue
        note = f"<system-reminder>\n{_text_of(message)}\n</system-reminder>"
        _add_note(made, note, rules)
    return made


def _is_inline(messages: Sequence[Json], i: int) -> bool:
    return i > 0 and messages[i].get("role") in _SYSTEM


def _text_of(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]  # no images, those are refused
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
    return str(content or "")


def _add_note(made: list[Json], note: str, rules: TemplateRules) -> None:
    before = made[-1]
    if not rules.repeated_users and before["role"] in ("user", "tool"):
        made[-1] = _joined(before, {"content": note})
    else:
        made.append({"role": "user", "content": note})


def _alternating(messages: Sequence[Json]) -> list[Json]:
    """Join users' messages that follow each other."""
    made: list[Json] = []
    for message in messages:
        if made and made[-1]["role"] == message["role"] == "user":
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
    return made


def _joined(before: Json, after: Json) -> Json:
    """Return ``before`` with the content of both: as text, or as parts if one holds an image."""
    parts = [*_parts(before), *_parts(after)]
    if all(part.get("type") == "text" for part in parts):
        return {**before, "content": f"{_text_of(before)}\n\n{_text_of(after)}"}
    return {**before, "content": parts}


def _parts(message: Json) -> list[Json]:
    content = message.get("content")
    if isinstance(content, list):
        return [part for part in content if isinstance(part, dict)]
    return [{"type": "text", "text": str(content or "")}]


def keep_reasoning(raw: Json, rules: TemplateRules) -> None:
    """Switch this on in a chat's body, unless the client sets the template's switch itself."""
    if rules.reasoning_switch:
        said = raw.get("chat_template_kwargs") or {}
        raw["chat_template_kwargs"] = {**rules.reasoning_switch, **said}
