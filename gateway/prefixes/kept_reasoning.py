"""Has a model's template write the reasoning of earlier turns, so that prompts begin alike."""

from __future__ import annotations

from engines.openai.requests import Json
from engines.wire import TemplateRules


def keep_reasoning(raw: Json, rules: TemplateRules) -> None:
    """Switch this on in a chat's body, unless the client sets the template's switch itself."""
    if rules.reasoning_switch:
        said = raw.get("chat_template_kwargs") or {}
        raw["chat_template_kwargs"] = {**rules.reasoning_switch, **said}
