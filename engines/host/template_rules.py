"""Finds out which orders of messages a model's chat template takes, by rendering three chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from jinja2 import TemplateError

from engines.wire import TemplateRules

Chat: TypeAlias = list[dict[str, str]]

_REFUSALS: Final = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


_SAID: Final = "words-number-"


def _chat(*roles: str) -> Chat:
    return [{"role": role, "content": f"{_SAID}{i}"} for i, role in enumerate(roles)]


_PLAIN: Final = _chat("user", "assistant", "user")
# Behind a question, as agents append them to tool results.
_INLINE: Final = _chat("system", "user", "system", "assistant", "user", "system")
_REPEATED: Final = _chat("user", "assistant", "user", "user")


def rules_of(render: Callable[[Sequence[dict[str, str]]], object]) -> TemplateRules:
    """Return the rules of a template; a template that refuses even a plain chat has none.

    Args:
        render: writes a chat as the model reads it, or raises what templates raise.
    """
    if not _takes(render, _PLAIN):
        return TemplateRules()  # there is nothing to be learned from it
    return TemplateRules(
        inline_system=_takes(render, _INLINE), repeated_users=_takes(render, _REPEATED)
    )


def _takes(render: Callable[[Sequence[dict[str, str]]], object], chat: Chat) -> bool:
    try:
        text = render(chat)
    except _REFUSALS:
        return False
    # Some templates refuse by leaving a message out, or by moving it to the top.
    places = [str(text).find(message["content"]) for message in chat]
    return -1 not in places and places == sorted(places)
