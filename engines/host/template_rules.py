"""Finds the forms of prompt that a model accepts, from its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final, Protocol, TypeAlias

from jinja2 import TemplateError

from engines.wire import FillIn, TemplateRules

Chat: TypeAlias = list[dict[str, str]]

_REFUSALS: Final = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


_SAID: Final = "words-number-"
# The reasoning of a turn before the last question, which many templates leave out.
_THOUGHT: Final = f"{_SAID}thought"
_REASONED: Final = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": _THOUGHT},
    {"role": "user", "content": "c"},
]
# The arguments that make templates keep that reasoning.
_SWITCHES: Final = (
    {"preserve_thinking": True},
    {"clear_thinking": False},
    {"truncate_history_thinking": False},
    {"drop_thinking": False},
)
# The fill-in-the-middle tokens of Qwen and CodeGemma; StarCoder and Granite; SantaCoder; DeepSeek,
# whose second one marks the hole.
_KNOWN: Final = (
    FillIn("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    FillIn("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    FillIn("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FillIn("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def _chat(*roles: str) -> Chat:
    return [{"role": role, "content": f"{_SAID}{i}"} for i, role in enumerate(roles)]


_PLAIN: Final = _chat("user", "assistant", "user")
# System messages after the first, as agents append them to tool results.
_INLINE: Final = _chat("system", "user", "system", "assistant", "user", "system")
_REPEATED: Final = _chat("user", "assistant", "user", "user")


class Render(Protocol):
    """Renders a chat as the model reads it; raises whatever the template raises."""

    def __call__(self, chat: Sequence[dict[str, str]], /, **switches: bool) -> object: ...


def rules_of(render: Render) -> TemplateRules:
    """Return the rules of a template; the defaults if it refuses even a plain chat."""
    if not _takes(render, _PLAIN):
        return TemplateRules()
    return TemplateRules(
        inline_system=_takes(render, _INLINE),
        repeated_users=_takes(render, _REPEATED),
        reasoning_switch=_reasoning_switch(render),
    )


def _reasoning_switch(render: Render) -> dict[str, bool]:
    if _reasons(render, {}):
        return {}  # it needs none
    return next((x for x in _SWITCHES if _reasons(render, x)), {})


def _reasons(render: Render, switches: dict[str, bool]) -> bool:
    try:
        return _THOUGHT in str(render(_REASONED, **switches))
    except _REFUSALS:
        return False


def _takes(render: Render, chat: Chat) -> bool:
    try:
        text = render(chat)
    except _REFUSALS:
        return False
    # Some templates refuse by leaving a message out, or by moving it to the top.
    places = [str(text).find(message["content"]) for message in chat]
    return -1 not in places and places == sorted(places)


def fill_in_of(vocabulary: Container[str]) -> FillIn | None:
    """Return the fill-in-the-middle tokens that a vocabulary has; None if it has none."""
    for marks in _KNOWN:
        if all(mark in vocabulary for mark in (marks.before, marks.between, marks.after)):
            return marks
    return None
