"""Patterns of JSON schemas: which of them the two compilers read, and in what form."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from engines.openai.requests import InvalidRequest
from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.keywords import left_out
from engines.openai.schemas.patterns import in_rust, is_plain
from engines.vllm_plugin.grammar.wanted import for_calls
from tests.unit.engines.openai.asked import TEXT, held, of, offered

UNREAD = ["^\\p{L}+$", "^[\\p{L}\\d]$", "a\\P{Lu}", "(?i)a", "(?i:a)b", "^\\x{41}$", "(^a|b)c"]


# Its texts would have these as they are, so that the arguments were no JSON.
UNREAD += ['^"x"$', r"^[\\]$", "^😀$", r"^\u0022$", r"^[A-Z]:\\", r"^a\nb$", "^a\tb$"]


ANY = r"[\s\S]*"


@pytest.mark.parametrize("pattern", UNREAD)
def test_what_xgrammar_does_not_read_is_left_out_of_calls_at_vllm(pattern: str) -> None:
    """It takes a class of Unicode in another class for its letters, and refuses it alone."""
    schema = of(type="string", pattern=pattern)
    forced = offered(schema, "required").held_schemas
    assert (left_out(forced, "vllm"), left_out(forced, "mlx")) == (["pattern"], [])
    assert left_out(held(schema).held_schemas, "vllm") == []
    strict = offered(schema, strict=True).held_schemas
    with pytest.raises(InvalidRequest, match="'pattern' is not permitted") as refusal:
        left_out(strict, "vllm")
    assert refusal.value.param == "tools[0].function.parameters"
    assert left_out(strict, "mlx") == []
    assert for_calls(schema) == of(type="string")


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^[a-z]$", "^[a-z]$"),
        ("^(?:a)(?<n>b)(?P<m>c)$", "^(?:a)(?<n>b)(?P<m>c)$"),
        ("^https?://", rf"^https?://{ANY}$"),
        ("[0-9]+$", rf"^{ANY}[0-9]+$"),
        ("^a(-b+)?$", "^a(-b+){0,1}$"),
        ("@", rf"^{ANY}@{ANY}$"),
        ("", rf"^{ANY}$"),
        ("^a|b$", rf"^(?:a{ANY}|{ANY}b)$"),
        ("^(a|b)$", "^(a|b)$"),
        (r"\Aa\z", "^a$"),
        ("é", rf"^{ANY}\u00e9{ANY}$"),
        ("^[äb]]$", r"^[\u00e4b]\]$"),
        ('^[^["]$', '^[^["]$'),  # its classes have no quotes and backslashes anyway
    ],
)
def test_xgrammar_is_given_patterns_of_the_whole_text(pattern: str, written: str) -> None:
    schema = of(type="string", pattern=pattern)
    assert left_out(offered(schema, strict=True).held_schemas, "vllm") == []
    assert for_calls(schema) == of(type="string", pattern=written)
    keys = {"type": "object", "patternProperties": {pattern: TEXT}, "additionalProperties": False}
    assert for_calls(keys)["patternProperties"] == {written: TEXT}


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^[^[\\]]+$", r"^[^\[\]]+$"),
        (r"^[\w.[\]]$", r"^[\w.\[\]]$"),
        ("[a&&b~~c]", r"[a&\&b~\~c]"),
        ("[+--]", r"[+-\-]"),
        (r"^\Aa$\z", "^a$"),
    ],
)
def test_llguidance_is_given_classes_without_operators(pattern: str, written: str) -> None:
    schema = of(type="string", pattern=pattern)
    assert left_out(held(schema, strict=True).held_schemas, "vllm") == []
    assert enforceable(schema) == of(type="string", pattern=written)


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        *((x, True) for x in ("(?:a)", "(?<n>a)", "\\\\1", "[\\n]", "[(?=]", "\\(?=", "(?i)a")),
        *((x, True) for x in ("[a&&b]", "^^a$$", "^a|^b$", "(^a|b$)", "a{2}?", "[\\w-.]", "}]")),
        *((x, True) for x in ("\\u{41}-\\x42", "")),
        *((x, False) for x in ("a(?=b)", "\\B", "[^]", "[\\]](x)\\1", "\\k<n>", "a\\Z")),
        *((x, False) for x in ("/^a$/i", "a^b", "(a$)b", "(a$|b)c", "(^a)?b", "$^", "a$?", "^*")),
        *((x, False) for x in ("*a", "a|*b", "(+)", "a{2,1}", "a{,3}", "a{", "{a}", "(a", "a)")),
        *(
            (x, False)
            for x in ("[z-a]", "[a-\\d]", "[\\s-a]", "[\\b]", "(?<n>a)(?<n>b)", "[]", "[a")
        ),
        *((x, False) for x in ("\\cJ", "\\0", "\\h", "\\x4", "\\uD83D\\uDE00", "(?>a)", "(?#c)")),
        ("\\", False),
    ],
)
def test_patterns_that_look_elsewhere(pattern: str, plain: bool) -> None:
    assert is_plain(pattern) == plain
    text = json.dumps({"type": "string", "pattern": in_rust(pattern) if plain else pattern})
    grammar = LLMatcher.grammar_from_json_schema(text)
    assert (
        plain == (not LLMatcher.validate_grammar(grammar, LLTokenizer("byte"))) or pattern == "\\"
    )
