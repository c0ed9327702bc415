"""The end of ``docs/conformance.md``: the fields of other servers' requests, and their treatment.

``benchmarks/conformance.py`` writes the counts before it, and ends its page with this.
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
Many clients send fields of servers other than OpenAI's. In all four dialects they are treated as
follows (`engines/openai/foreign_fields.py`, from which `make reference` writes the tables below):

- A field that changes the answer on some server is honoured, or refused by name (400, with the name
  in `param`). A field that is only a hint is accepted and has no effect.
- Values without effect (null, and as a rule `false`, 0, an empty list, a sampler's neutral value)
  are always accepted.
- Two constraints for one answer are refused. If a field comes under two names, OpenAI's counts.
- Fields of chats that Anthropic's messages and OpenAI's responses lack (`top_k`, `min_p`, `seed`,
  penalties, `logit_bias`, `ignore_eos`, `min_tokens`, `structured_outputs`, `response_format`,
  `chat_template_kwargs`) are honoured there, too.
- All other fields are ignored and named in the header `x-thermocline-ignored`. Only a field that
  looks like a misspelling (`temprature`) of one that changes the answer is refused by name, unless
  the correct one is sent as well.

Keywords of JSON schemas that cannot be enforced are left out, and named in the header
`x-thermocline-left-out`; a schema with `strict` is refused instead, with the keyword and its
place. The table `engines/openai/schemas/keywords.py` says which are enforced. On both engines these
are not:

- `patternProperties`, `propertyNames`, `minProperties`, `maxProperties`, `uniqueItems`, `contains`,
  `not`, `if`, `dependentRequired`, `unevaluatedProperties` and the like; if one that can name
  further properties is left out, the object may have any;
- a `$ref` to anything but `#` or an entry of the root's `$defs` or `definitions`, and every `$ref`
  of a schema that has an `$id` inside;
- patterns beyond a plain class: ASCII without quotes, backslashes and control characters, `^` and
  `$` at the ends, groups three deep, no lookahead or lookbehind, flags, `\\b` or `\\p`;
- formats other than OpenAI's and `uri`; a format beside an enforced pattern, a `const` or an
  `enum` (`strict` permits these);
- bounds of numbers that are not whole; numbers beyond 2**53 in bounds, `enum` and `const`;
  `multipleOf` of other numbers than integers;
- names that a closed object requires but does not list in `properties`;
- in a recursive schema, keywords beside a `$ref` or beside choices (`anyOf` and the like);
- malformed schemas, in all tools that the model is shown: a property whose schema is a string may
  have any value, and an unknown `type` (`any`) counts as none.

In calls on vLLM these are not enforced either, since its compiler ignores them: lengths of strings
(`strict` permits these), patterns of a part of a string or with `.`, `\\s` or an excluding class,
`allOf` of several schemas, a `$ref` or choices beside other keywords, a `type` beside choices,
required properties that are not listed, bounds, patterns and formats without a `type`, `multipleOf`
beside bounds, keywords beside `enum` or `const`, and further properties beside one whose name has a
quote, a backslash, a control character or one beyond ASCII. There, properties or items without a
`type` mean an object or a list.

`oneOf` is enforced as `anyOf`, and not named in the header. Unknown keywords have no effect.
A `$ref` that leads back to itself in every value is refused. Tuples of older drafts, a list of
`items` with `additionalItems`, are shown and enforced as `prefixItems` with `items`.
"""
# Fields that Thermocline has under the same name, perhaps in another form; by server.
_OWN: Final[dict[str, tuple[tuple[str, str, str], ...]]] = {
    "vLLM": (
        (
            "`structured_outputs`",
            "honoured",
            "on mlx in chats: one of `json`, `json_object`, `regex`, `choice`; others are refused",
        ),
        ("`min_tokens`", Fate.ON_VLLM.value, ""),
        ("`top_k`, `min_p`, `repetition_penalty`, `ignore_eos`", "honoured", ""),
        ("`chat_template_kwargs`", "honoured", "except names that the server sets itself"),
        ("`messages[].reasoning`", "honoured", "as `reasoning_content`"),
    ),
    "llama.cpp": (
        (
            "`response_format`",
            "honoured",
            "in OpenAI's form, and with `schema` beside the type `json_object` or `json_schema`",
        ),
        ("`seed`", "honoured", "-1: another seed for each request"),
    ),
    "Ollama": (
        ("`options`", "honoured", "each field in it like one beside it; unknown ones are refused"),
        ("`messages[].thinking`", "honoured on mlx, ignored on vLLM", "as `reasoning_content`"),
    ),
    "LM Studio": (("`response_format`", "honoured", "`strict` may be a string"),),
    "SGLang": (("`top_k`, `min_p`, `min_tokens`, `ignore_eos`", "", "as vLLM's"),),
    "mlx_lm.server": (
        ("`top_k`, `min_p`, `repetition_penalty`, `chat_template_kwargs`", "honoured", ""),
    ),
}


def conformance_page() -> str:
    """Return the page with its counts unchanged, and the section of fields written anew."""
    counts = PATH.read_text("utf-8").partition(f"\n{HEAD}\n")[0]
    return f"{counts}\n{fields_section()}"


def fields_section() -> str:
    """Return the section with a table for each server."""
    parts = [HEAD, INTRODUCTION.strip()]
    for server in SERVERS:
        rows = [*_OWN.get(server, ()), *_rows(x for x in FOREIGN_FIELDS if server in x.servers)]
        inside = [x for x in IN_MESSAGES if server in x.servers]
        rows += [(code(f"messages[].{x.name}"), x.fate.value, x.words) for x in inside]
        parts += [f"### {server}", table(("field", "here", "how"), rows)]
    return "\n\n".join(parts) + "\n"


def _rows(fields: Iterable[ForeignField]) -> list[tuple[str, str, str]]:
    """Return one row for all fields with the same treatment and remedy."""
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
