"""A chat template that knows no tools is given some, and stays as it was without them."""

from __future__ import annotations

from typing import Any

import pytest

from engines.vllm_environment.model_files import with_tools

pytestmark = pytest.mark.mlx

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": {"city": {}}}},
    }
]
USER = {"role": "user", "content": "In Paris?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
}
RESULT = {"role": "tool", "content": "rain", "tool_call_id": "1"}


def rendered(template: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=True
    )
    return str(text)


@pytest.mark.parametrize("start", ["", "\n", "  \n ", "{# note #}\n"])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, {**USER, "role": "x"}]])
def test_chats_without_tools_are_untouched(messages, start):
    template = start + CHATML
    assert rendered(with_tools(template), messages) == rendered(template, messages)


def test_tools_are_described_in_the_system_message():
    text = rendered(with_tools(CHATML), [SYSTEM, USER], TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions:\n")
    assert '{"name": "weather", "parameters": {"properties": {"city": {}}}}' in text
    assert text.count("<|im_start|>system") == 1
    without = rendered(with_tools(CHATML), [USER], TOOLS)
    assert without.startswith("<|im_start|>system\nYou can call these functions:\n")
    assert "<|im_start|>user\nIn Paris?<|im_end|>" in without


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_calls_and_results_become_text(tools):
    text = rendered(with_tools(CHATML), [USER, CALL, RESULT], tools)
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    assert f"<|im_start|>assistant\n{called}<|im_end|>\n" in text
    assert "<|im_start|>user\nResult of the function: rain<|im_end|>" in text
