"""Limits the size of a request's JSON schemas before any compiler gets them.

The counted quantities determine a compiler's time and memory. All schemas of a request count
together, since they become one grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from engines.openai.errors import FieldError, InvalidRequest

MAX_BYTES: Final = 512 << 10  # 128 functions of 4 KiB
MAX_PROPERTIES: Final = 5000  # OpenAI's limit
# Levels of JSON objects and lists; a nested object of a schema takes two. OpenAI allows ten levels.
MAX_DEPTH: Final = 64
MAX_ENUM_VALUES: Final = 5000  # five times OpenAI's
# Limit on the sum, over all objects, of the squared number of optional properties, to which a
# compiler's time is proportional. One object may have 512 of them, 128 functions may have 45 each.
MAX_OPTIONAL_SQUARES: Final = 512 * 512
# Sum of the digits of ``multipleOf``, read as integers: the states of the automata.
MAX_DIVISORS: Final = 1 << 16
# Most characters that all patterns can match, each ``{m,n}`` expanded.
MAX_PATTERN_CHARS: Final = 1 << 14
# Branches of ``allOf``, which compilers have to intersect.
MAX_ALL_OF: Final = 64
# Different limits on the length of texts above ``FREE_LENGTH``. vLLM's compiler takes about one CPU
# second for each.
MAX_LENGTHS: Final = 8
FREE_LENGTH: Final = 32
# vLLM's ``structured_outputs`` has one of these.
_FORMS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")

_REPEAT: Final = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
# A repeat, a class of characters, an escaped character, or any other one.
_THINGS: Final = re.compile(
    _REPEAT.pattern + r"|\[\^?\]?(?:\\.|[^\]\\]){0,250}+\]|\\.|.", re.DOTALL
)


class SchemaCount:
    """The counts over all schemas of one request; ``add`` adds one schema."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_properties = 0
        self.num_enum_values = 0
        self.num_all_of = 0
        self.optional_squares = 0
        self.divisors = 0
        self.pattern_chars = 0
        self.lengths: dict[tuple[str, int], str] = {}  # (keyword, length) -> the request's field

    def add(self, field: str, schema: object, *, of_call: bool = False) -> None:
        """Add the counts of a schema.

        Args:
            of_call: the schema is for a call's arguments; their lengths do not count, since vLLM
                does not enforce them.

        Raises:
            FieldError: with ``field``, the schemas exceed a limit.
        """
        known = dict(self.lengths)
        self.num_bytes += len(msgspec.json.encode(schema))
        self._check(field, self.num_bytes, MAX_BYTES, "bytes of JSON")
        for node, depth in _nodes(schema):
            if depth > MAX_DEPTH:
                raise FieldError(field, f"the JSON schema is nested over {MAX_DEPTH} levels deep")
            if isinstance(node, dict):
                self._count(field, node)
        self._check_all(field)
        if of_call:
            self.lengths = known

    def add_pattern(self, field: str, pattern: str) -> None:
        """Add the counts of a pattern outside of a schema. Raises ``FieldError``."""
        self._count_pattern(field, pattern)
        self._check_all(field)

    def add_structured_outputs(self, wanted: Mapping[str, object] | None) -> None:
        """Add the counts of vLLM's ``structured_outputs``: a schema, pattern, choices or grammar.

        Raises:
            FieldError: it asks for nothing; or with it, the schemas exceed a limit.
        """
        if wanted is None:
            return
        if all(wanted.get(x) in (None, False, "", []) for x in _FORMS):
            forms = ", ".join(_FORMS)
            raise FieldError("structured_outputs", f"it has none of {forms}: leave it out")
        for name, value in wanted.items():
            field = f"structured_outputs.{name}"
            if name == "regex" and isinstance(value, str):
                self.add_pattern(field, value)
            elif name in ("json", "structural_tag") and isinstance(value, str):
                try:
                    self.add(field, msgspec.json.decode(value))
                except (msgspec.DecodeError, RecursionError) as error:
                    raise FieldError(field, f"it is not JSON: {error}") from error
            else:
                self.add(field, {"enum": value} if name == "choice" else value)

    def check_lengths(self) -> None:
        """Raise ``InvalidRequest`` for too many lengths; only vLLM's compiler is slow with them."""
        if len(self.lengths) > MAX_LENGTHS:
            raise InvalidRequest(
                f"The JSON schemas of this request hold texts to {len(self.lengths)} different"
                f" lengths above {FREE_LENGTH} (maxLength, minLength, repeats of a pattern), and"
                f" this engine takes {MAX_LENGTHS}: use fewer different ones.",
                next(iter(self.lengths.values())),
            )

    def _count(self, field: str, node: dict[str, Any]) -> None:
        if isinstance(named := node.get("properties"), dict):
            needed = {x for x in _listed(node.get("required")) if isinstance(x, str)}
            self.num_properties += len(named)
            self.optional_squares += len(named.keys() - needed) ** 2
        self.num_enum_values += len(_listed(node.get("enum")))
        self.num_all_of += len(_listed(node.get("allOf")))
        self.divisors += _digits(node.get("multipleOf"))
        for name in ("minLength", "maxLength"):
            if isinstance(length := node.get(name), int | float) and length > FREE_LENGTH:
                self.lengths[name, int(length)] = field
        if isinstance(pattern := node.get("pattern"), str):
            self._count_pattern(field, pattern)
        if isinstance(by_pattern := node.get("patternProperties"), dict):
            for pattern in by_pattern:
                self._count_pattern(field, pattern)

    def _count_pattern(self, field: str, pattern: str) -> None:
        self.pattern_chars += pattern_chars(pattern)
        bounds = (max(int(m), int(n or 0)) for m, n in _REPEAT.findall(pattern))
        self.lengths |= {("pattern", x): field for x in bounds if x > FREE_LENGTH}

    def _check_all(self, field: str) -> None:
        self._check(field, self.num_properties, MAX_PROPERTIES, "properties")
        self._check(field, self.num_enum_values, MAX_ENUM_VALUES, "values of enums")
        self._check(field, self.num_all_of, MAX_ALL_OF, "branches of allOf")
        self._check(field, self.divisors, MAX_DIVISORS, "as the sum of multipleOf's digits")
        self._check(field, self.pattern_chars, MAX_PATTERN_CHARS, "characters of patterns")
        if self.optional_squares > MAX_OPTIONAL_SQUARES:
            most = int(MAX_OPTIONAL_SQUARES**0.5)
            raise FieldError(
                field,
                "the JSON schemas have too many optional properties: the squares of their number"
                f" in each object make {self.optional_squares}, more than {MAX_OPTIONAL_SQUARES}"
                f" ({most} in a single object): list more of them as required, or send fewer",
            )

    @staticmethod
    def _check(field: str, number: int, most: int, what: str) -> None:
        if number > most:
            raise FieldError(
                field, f"the JSON schemas of this request have {number} {what}, more than {most}"
            )


def pattern_chars(pattern: str) -> int:
    """Return an estimate of the most characters that a pattern matches, each ``{m,n}`` expanded.

    ``*`` and ``+`` count once. A pattern longer than ``MAX_PATTERN_CHARS`` counts by its length.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        return len(pattern)
    sums, last = [0], 0  # counts by depth of parentheses, and of the last item before a repeat
    for thing in _THINGS.finditer(pattern):
        if thing[1]:
            times = max(int(thing[1]), int(thing[2] or 0), 1)
            sums[-1] += last * (times - 1)
            last *= times
        elif thing[0] == "(":
            sums.append(0)
        elif thing[0] == ")" and len(sums) > 1:
            last = max(sums.pop(), 1)
            sums[-1] += last
        elif thing[0] not in "*+?|^$":
            last = 1
            sums[-1] += 1
    return sum(sums)


def _digits(divisor: object) -> int:
    """Return a divisor without its decimal point: 25 for 0.25."""
    if isinstance(divisor, int):
        return abs(divisor)
    if not isinstance(divisor, float):
        return 0
    return int(f"{divisor:.15g}".partition("e")[0].replace(".", "").lstrip("-0") or 0)


def _nodes(schema: object) -> Iterator[tuple[object, int]]:
    """Yield every object and list, and its depth; without recursion, as schemas may be deep."""
    waiting: list[tuple[object, int]] = [(schema, 1)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        inner: Iterable[object] = ()
        if isinstance(node, dict):
            inner = node.values()
        elif isinstance(node, list):
            inner = node
        waiting += [(x, depth + 1) for x in inner if isinstance(x, dict | list)]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
