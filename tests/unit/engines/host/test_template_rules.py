"""A template's rules are found by rendering with it."""

from __future__ import annotations

import jinja2
import pytest

from engines.host.template_rules import rules_of
from engines.wire import TemplateRules

ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# As Qwen's and others' newest templates have it.
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# As Mistral's and Gemma's.
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
# Silently drops messages that it does not expect.
SILENT = "{% for m in messages if m.role != 'system' or loop.first %}{{ m.content }}{% endfor %}"
# Collects system messages at the top.
HOISTING = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
)
BROKEN = "{{ raise_exception('no') }}"
# Leaves out reasoning before the last question, unless it is asked to keep it.
FORGETFUL = (
    "{% for m in messages %}{% if m.reasoning_content and (loop.last or KEPT) %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "rules"),
    [
        (ANY, TemplateRules()),
        (SYSTEM_FIRST, TemplateRules(inline_system=False)),
        (ALTERNATING, TemplateRules(inline_system=False, repeated_users=False)),
        (SILENT, TemplateRules(inline_system=False)),
        (HOISTING, TemplateRules(inline_system=False)),
        (BROKEN, TemplateRules()),
    ],
)
def test_rules(template: str, rules: TemplateRules) -> None:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    compiled = jinja2.Environment().from_string(template)
    assert rules_of(lambda chat: compiled.render(messages=chat, raise_exception=refuse)) == rules


@pytest.mark.parametrize(
    ("kept", "switch"),
    [
        ("true", {}),
        ("false", {}),
        ("preserve_thinking", {"preserve_thinking": True}),
        ("(clear_thinking is defined and not clear_thinking)", {"clear_thinking": False}),
    ],
)
def test_the_switch_that_keeps_reasoning_is_found(kept: str, switch: dict[str, bool]) -> None:
    compiled = jinja2.Environment().from_string(FORGETFUL.replace("KEPT", kept))
    found = rules_of(lambda chat, **given: compiled.render(messages=chat, **given))
    assert found == TemplateRules(reasoning_switch=switch)
