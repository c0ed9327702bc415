"""The parsers of a model are chosen by its type and its chat template."""

from __future__ import annotations

import json

import pytest

from engines.vllm_environment.model_files import (
    ModelFiles,
    needs_tool_template,
    parsers_for,
    read_model_files,
)

QWEN = "{% if tools %}<tool_call>{{ x }}</tool_call>{% endif %}<think> enable_thinking"
QWEN_CODER = "{% if tools %}<tool_call>\\n<function=f>{% endif %}"
CASES = [
    ("gpt_oss", "tools", ("openai", "openai_gptoss")),
    ("qwen3", QWEN, ("hermes", "qwen3")),
    ("qwen3_next", QWEN_CODER + "<think>", ("qwen3_xml", "qwen3")),
    ("qwen2", "tools '<｜Assistant｜><think>\\n'", ("hermes", "deepseek_r1")),
    ("deepseek_v3", "tools <｜tool▁calls▁begin｜> thinking", ("deepseek_v31", "deepseek_v3")),
    ("deepseek_v3", "tools <｜tool▁calls▁begin｜> ```json", ("deepseek_v3", "")),
    ("glm4_moe", "tools <arg_key> <think>", ("glm45", "glm45")),
    ("glm4_moe_lite", "tools <arg_key> <think>", ("glm45", "glm45")),
    ("mistral3", "tools [TOOL_CALLS]", ("mistral", "")),
    ("mistral3", "tools [TOOL_CALLS] [THINK]", ("mistral", "mistral")),
    ("llama", "tools ipython", ("llama3_json", "")),
    ("llama4", "tools ipython", ("llama4_pythonic", "")),
    ("nemotron_h", QWEN_CODER + "<think>", ("qwen3_xml", "nemotron_v3")),
    ("granitemoehybrid", "tools <tool_call>", ("granite4", "")),
    ("lfm2", "tools <|tool_call_start|>", ("lfm2", "")),
    ("gemma4", "tools <|tool_call> <|channel>", ("gemma4", "gemma4")),
    ("llama", "{{ messages }}", ("hermes", "")),
    ("", "", ("hermes", "")),
]


@pytest.mark.parametrize(("model_type", "template", "expected"), CASES)
def test_a_family_is_known_by_type_and_template(model_type, template, expected):
    assert parsers_for(ModelFiles(model_type, template)) == expected


def test_tools_are_described_only_where_the_template_does_not():
    for template, needed in [("{{ messages }}", True), (QWEN, False), ("", False)]:
        files = ModelFiles("llama", template)
        assert needs_tool_template(files, parsers_for(files)) == needed


def test_a_models_files_are_read_wherever_its_template_lies(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_model_files(tmp_path) == ModelFiles("qwen3", "")
    several = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    for given, read in [("one", "one"), (several, "A\nB"), (None, ""), (3, "")]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
        assert read_model_files(tmp_path).template == read
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert read_model_files(tmp_path).template == "a file"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{", b"[" * 100_000])
def test_damaged_files_say_nothing(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    assert read_model_files(tmp_path) == ModelFiles()
