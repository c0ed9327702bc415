"""A template's rules are found by rendering with it."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engines.host.template_rules import fill_in_of, rules_of
from engines.wire import FillIn, TemplateRules
from tests.tiny_tokenizer import tiny_tokenizer

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


RULES = [
    *((x, TemplateRules()) for x in (ANY, BROKEN)),
    *((x, TemplateRules(inline_system=False)) for x in (SYSTEM_FIRST, SILENT, HOISTING)),
    (ALTERNATING, TemplateRules(inline_system=False, repeated_users=False)),
]


@pytest.mark.parametrize(("template", "rules"), RULES)
def test_rules(template: str, rules: TemplateRules) -> None:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    compiled = jinja2.Environment().from_string(template)
    assert rules_of(lambda chat: compiled.render(messages=chat, raise_exception=refuse)) == rules


SWITCHES: dict[str, dict[str, bool]] = {
    "true": {},
    "false": {},
    "preserve_thinking": {"preserve_thinking": True},
    "(clear_thinking is defined and not clear_thinking)": {"clear_thinking": False},
}


@pytest.mark.parametrize(("kept", "switch"), SWITCHES.items())
def test_the_switch_that_keeps_reasoning_is_found(kept: str, switch: dict[str, bool]) -> None:
    compiled = jinja2.Environment().from_string(FORGETFUL.replace("KEPT", kept))
    found = rules_of(lambda chat, **given: compiled.render(messages=chat, **given))
    assert found == TemplateRules(reasoning_switch=switch)


QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def tokenizer_with(folder: Path, marks: tuple[str, ...], special: bool) -> PreTrainedTokenizerFast:
    tiny_tokenizer(folder)
    made = PreTrainedTokenizerFast.from_pretrained(folder)
    made.add_tokens([AddedToken(x, special=special) for x in marks])
    return made


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("marks", [QWEN, DEEPSEEK])
def test_the_marks_of_a_tokenizer_are_one_token_each(tmp_path, marks, special):
    tokenizer = tokenizer_with(tmp_path, marks, special)
    found = fill_in_of(tokenizer.get_vocab())
    assert found == FillIn(*marks)
    ids = tokenizer.encode(found.prompt("The capital", "is Paris"), add_special_tokens=False)
    at = [ids.index(tokenizer.convert_tokens_to_ids(x)) for x in marks]
    assert at[0] == 0 and at[2] == len(ids) - 1
    assert tokenizer.decode(ids[1 : at[1]]) == "The capital"
    assert tokenizer.decode(ids[at[1] + 1 : at[2]]) == "is Paris"


def test_marks_that_are_not_all_there_are_none(tmp_path: Path) -> None:
    assert fill_in_of(tiny_tokenizer(tmp_path / "plain").get_vocab()) is None
    assert fill_in_of(tokenizer_with(tmp_path / "two", QWEN[:2], True).get_vocab()) is None
