"""Schemas written so that vLLM's own check of a request lets them pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from engines.host.grammar import GrammarWish, source_of
from engines.openai.schemas.keywords import left_out, with_enforceable_formats
from engines.openai.schemas.vllm_check import passing
from tests.unit.engines.openai.asked import BYTES, TEXT, held, of

NAMED = {"type": "object", "patternProperties": {"^x": {"type": "string"}}}


def takes(schema: dict[str, Any], value: object) -> bool:
    matcher = LLMatcher(BYTES, source_of(GrammarWish([], False, schema)).text)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(json.dumps(value).encode())) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("other", "good", "bad"),
    [
        ({"type": "integer", "multipleOf": 5}, 10, 7),
        ({"type": ["null", "string"], "format": "ipv4", "maxLength": 7}, "1.2.3.4", "10.20.30.40"),
        ({"type": "string", "pattern": "^a+$", "minLength": 2}, "aa", "a"),
        ({"allOf": [TEXT, {"maxLength": 2}, {"minLength": 1}]}, "ab", "abc"),
        ({"allOf": [True, {"allOf": [TEXT, {"maxLength": 2}]}, {"minLength": 1}]}, "ab", ""),
        (
            {**NAMED, "properties": {"a": TEXT}, "additionalProperties": False},
            {"a": "b", "xy": "z"},
            {"y": "z"},
        ),
    ],
)
def test_a_schema_with_named_patterns_means_the_same(other, good, bad):
    schema = {"type": "object", "properties": {"n": NAMED, "o": other}, "required": ["n", "o"]}
    asked = {"structured_outputs": {"json": schema}}
    sent, known = (with_enforceable_formats(asked, x) for x in ("vllm", "mlx"))
    assert sent != known
    for one in (schema, sent["structured_outputs"]["json"]):
        assert takes(one, {"n": {"x1": "t"}, "o": good})
        assert not takes(one, {"n": {"x1": "t"}, "o": bad})
        assert not takes(one, {"n": {"x1": 1}, "o": good})


def test_patterns_without_quotes_are_named_in_formats_on_vllm() -> None:
    """Its llguidance, 1.7, lets an escaped quote through."""
    asked = held(of(**TEXT, pattern='^[^"]{2}$'))
    assert left_out(asked.held_schemas, "vllm") == ["pattern"]
    assert left_out(asked.held_schemas, "mlx") == []


def test_other_schemas_stay_as_they_are() -> None:
    for schema in ({"type": "integer", "multipleOf": 5}, NAMED):
        assert passing(schema) is schema
