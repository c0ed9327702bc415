"""The end of ``docs/conformance.md``: fields of other servers' requests, and what we do with them.

The counts before it are written by ``benchmarks/conformance.py``, which ends its page with this.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from docs.generators.tables import code, table
from engines.openai.foreign_fields import FOREIGN_FIELDS, IN_MESSAGES, SERVERS, Fate, ForeignField

PATH = Path(__file__).parents[1] / "conformance.md"
HEAD: Final = "## Fields of other servers"
INTRODUCTION: Final = """
A field on which some server acts, and which changes the answer, is honoured or refused by name
(400, with the name in `param`), in all four dialects; what only hints is taken and changes nothing.
The list is `engines/openai/foreign_fields.py`, and these tables are written from it by
`make reference`. Values that ask for nothing (null, and as a rule `false`, 0, an empty list, a
sampler's neutral value) are always taken. Two constraints for one answer are refused; of two names
for one field OpenAI's counts. Chats' fields that Anthropic's messages and OpenAI's responses lack
(`top_k`, `min_p`, `seed`, penalties, `logit_bias`, `ignore_eos`, `min_tokens`,
`structured_outputs`, `response_format`, `chat_template_kwargs`) count there, too. Other fields are
ignored and named in the header `x-thermocline-ignored`; only one that looks like a misspelt field
that changes the answer (`temprature`), where that is not sent as well, is refused with its name.

Keywords of JSON schemas that are not held are left out, and named in the header
`x-thermocline-left-out`; a schema that says `strict` is refused instead, with the keyword and its
place. One table says what is held (`engines/openai/schemas/keywords.py`). On both engines these are
not:

- `patternProperties`, `propertyNames`, `minProperties`, `maxProperties`, `uniqueItems`, `contains`,
  `not`, `if`, `dependentRequired`, `unevaluatedProperties` and the like; an object without one that
  may name further properties stays open;
- a `$ref` that leads elsewhere than to `#` or to an entry of the root's `$defs` or `definitions`,
  and, in a schema with an `$id` inside, all of them;
- patterns beyond a plain class: ASCII without quotes, backslashes and control characters, `^` and
  `$` at the ends, groups three deep, no looks ahead or back, flags or `\\b`, `\\p`;
- formats other than OpenAI's and `uri`; a format beside a pattern that is held, a `const` or an
  `enum`, which `strict` permits;
- bounds of numbers that are not whole or lie beyond 2**53; `multipleOf` of other numbers than
  integers; numbers beyond 64 bits in `enum` and `const`;
- names that a closed object requires and excludes;
- where a `$ref` goes round, its neighbours, and those of choices;
- what has no form, in all tools that the model is shown: a property whose schema is a text may be
  anything, and a `type` that does not exist (`any`) is none.

In calls at vLLM, whose compiler ignores them, also lengths of texts (`strict` permits these),
patterns of a part of a text or with `.`, `\\s` or an excluding class, `allOf` of several, a `$ref`
or choices beside other keywords, a `type` beside choices, required properties that are not named,
bounds, patterns and formats without a `type`, `multipleOf` beside bounds, and what stands beside
`enum` or `const`. There, properties or items without a `type` mean an object or a list.

`oneOf` is held as `anyOf`, and not named. Keywords that JSON Schema does not know ask for nothing.
A `$ref` that leads back to itself in every value is refused. Tuples of older drafts, a list of
`items` with `additionalItems`, are shown and held to as `prefixItems` with `items`.
"""
# Fields that are ours under the same name, and forms of them; by server.
_OWN: Final[dict[str, tuple[tuple[str, str, str], ...]]] = {
    "vLLM": (
        (
            "`structured_outputs`",
            "honoured",
            "on mlx in chats: one of `json`, `json_object`, `regex`, `choice`; others are refused",
        ),
        ("`min_tokens`", Fate.ON_VLLM.value, ""),
        ("`top_k`, `min_p`, `repetition_penalty`, `ignore_eos`", "honoured", ""),
        ("`chat_template_kwargs`", "honoured", "but for the names that the server sets itself"),
        ("`messages[].reasoning`", "honoured", "as `reasoning_content`"),
    ),
    "llama.cpp": (
        (
            "`response_format`",
            "honoured",
            "OpenAI's, and with `schema` beside the type `json_object` or `json_schema`",
        ),
        ("`seed`", "honoured", "-1: another one at each request"),
    ),
    "Ollama": (
        ("`options`", "honoured", "each field in it as one beside it; unknown ones are refused"),
        ("`messages[].thinking`", "honoured on mlx, ignored on vLLM", "as `reasoning_content`"),
    ),
    "LM Studio": (("`response_format`", "honoured", "`strict` may be a text"),),
    "SGLang": (("`top_k`, `min_p`, `min_tokens`, `ignore_eos`", "", "as vLLM's"),),
    "mlx_lm.server": (
        ("`top_k`, `min_p`, `repetition_penalty`, `chat_template_kwargs`", "honoured", ""),
    ),
}


def conformance_page() -> str:
    """Return the page with the fields written anew; the counts stay as they are."""
    counts = PATH.read_text("utf-8").partition(f"\n{HEAD}\n")[0]
    return f"{counts}\n{fields_section()}"


def fields_section() -> str:
    """Write a table for each server."""
    parts = [HEAD, INTRODUCTION.strip()]
    for server in SERVERS:
        rows = [*_OWN.get(server, ()), *_rows(x for x in FOREIGN_FIELDS if server in x.servers)]
        inside = [x for x in IN_MESSAGES if server in x.servers]
        rows += [(code(f"messages[].{x.name}"), x.fate.value, x.words) for x in inside]
        parts += [f"### {server}", table(("field", "here", "how"), rows)]
    return "\n\n".join(parts) + "\n"


def _rows(fields: Iterable[ForeignField]) -> list[tuple[str, str, str]]:
    """Write a row for all fields that are answered alike."""
    groups: dict[tuple[Fate, str], list[str]] = {}
    for field in fields:
        groups.setdefault((field.fate, field.words), []).append(code(field.name))
    order = list(Fate)
    return [
        (", ".join(names), fate.value, _how(fate, words))
        for (fate, words), names in sorted(groups.items(), key=lambda x: order.index(x[0][0]))
    ]


def _how(fate: Fate, words: str) -> str:
    return f"as {words}" if words.startswith("`") else words
