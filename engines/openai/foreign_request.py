"""Applies the list of foreign fields to a request, in any dialect, and names unknown ones.

OpenAI refuses every unknown field. Here newer clients, and those of other servers, keep working:
an unknown field is ignored, and named in a header of the answer. A request is refused only if an
unknown field looks like a misspelt one that changes the answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, NamedTuple

from engines.openai.errors import InvalidRequest
from engines.openai.foreign_fields import (
    FOREIGN_FIELDS,
    IN_MESSAGES,
    Fate,
    ForeignField,
    Make,
    wider_format,
)
from engines.openai.messages import Json

# Fields of our chats that other dialects lack or name differently.
CHAT_FIELDS: Final = (
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "min_tokens", "structured_outputs"),
    *("chat_template_kwargs", "response_format", "reasoning_effort"),
)
_OPTIONS: Final = "options"  # Ollama's object of fields, which count as fields of the body
_IN_OPTIONS: Final = frozenset({*CHAT_FIELDS, "temperature", "top_p"})
_KNOWN: Final[Mapping[str, ForeignField]] = {field.name: field for field in FOREIGN_FIELDS}
_HOLDERS: Final = ("response_format", "structured_outputs")
_LIMITS: Final = ("max_tokens", "max_completion_tokens")


class Dialect(NamedTuple):
    """The properties of a request's dialect that foreign fields depend on."""

    fields: tuple[str, ...]  # the dialect's own fields, which are not foreign
    shows: bool = False  # answers are passed on from the engine, with all that it reports
    renames: Mapping[str, str] = {}  # the dialect's names for fields of chats, used in errors


def take_foreign(asked: Json, raw: Json, dialect: Dialect, engine: str) -> dict[str, str]:
    """Apply the foreign fields of a request to the body for the engine.

    Args:
        asked: the client's body.
        raw: the body for the engine, which is changed; foreign fields that the engine does not know
            are removed.
        engine: the engine's kind; "" if it is not known yet.

    Returns:
        The client's name of each field of ``raw`` that was set from a foreign field.

    Raises:
        InvalidRequest: a field asks for something that is not supported here.
    """
    return _Taking(asked, raw, dialect, engine).take()


def ignored_fields(asked: Json, dialect: Dialect) -> list[str]:
    """Return the fields of the client's body that this server does not know.

    Raises:
        InvalidRequest: a field looks like a misspelt one that changes the answer.
    """
    ours, known = _known_fields(dialect.fields)
    return unknown_fields(asked, known, ours)


@cache
def _known_fields(own: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Return a dialect's fields that change the answer, and all its known fields."""
    honoured = {x.name for x in FOREIGN_FIELDS if x.fate is Fate.HONOURED}
    ours = frozenset({*own, *CHAT_FIELDS, *honoured} - CHANGE_NOTHING)
    return ours, ours | CHANGE_NOTHING | _KNOWN.keys()


class _Taking:
    def __init__(self, asked: Json, raw: Json, dialect: Dialect, engine: str) -> None:
        self._asked = dict(asked)
        self._raw = raw
        self._dialect = dialect
        self._engine = engine
        self._names: dict[str, str] = {}

    def take(self) -> dict[str, str]:
        self._check_messages(self._asked.get("messages"))
        self._unfold_options()
        for name in CHAT_FIELDS:
            if name not in self._dialect.fields and self._asked.get(name) is not None:
                self._add(name, {name: self._asked[name]})
        if "response_format" in self._raw:
            form = self._raw["response_format"]
            self._raw["response_format"] = _made("response_format", wider_format, form)
        for name, value in list(self._asked.items()):
            if name in _KNOWN and name not in self._dialect.fields:
                self._take(_KNOWN[name], value)
        return self._names

    def _unfold_options(self) -> None:
        options = self._asked.pop(_OPTIONS, None)
        self._raw.pop(_OPTIONS, None)
        if options is None:
            return
        if not isinstance(options, dict):
            raise _refusal(_OPTIONS, "an object is needed")
        for name, value in options.items():
            if name in _IN_OPTIONS:
                self._add(f"{_OPTIONS}.{name}", {name: value})
            elif name in _KNOWN:
                self._asked.setdefault(name, value)
            elif value is not None:
                raise _refusal(f"{_OPTIONS}.{name[:40]}", "it is not known here: leave it out")

    def _check_messages(self, messages: object) -> None:
        for i, message in enumerate(messages if isinstance(messages, list) else ()):
            for field in IN_MESSAGES if isinstance(message, dict) else ():
                if field.name == "images" and message.get("role") != "user":
                    continue  # answers and results are sent again at every turn, with any images
                if field.name in message and field.asks(message[field.name]):
                    raise _refusal(f"messages[{i}].{field.name}", field.words)

    def _take(self, field: ForeignField, value: Any) -> None:
        name = field.name
        if name not in _LIMITS or self._raw.get(name) == value:  # else another field has set it
            self._raw.pop(name, None)
        if not field.asks(value) or field.fate is Fate.HINT:
            return
        if field.beside and not any(_matters(self._asked.get(x)) for x in field.beside):
            return
        if field.fate is Fate.REFUSED:
            raise _refusal(name, f"it is not supported here: {field.words}")
        if field.fate is Fate.SHOWN_ON_VLLM and not self._dialect.shows:
            raise _refusal(name, "an answer of this kind cannot show it: leave it out")
        if field.fate is not Fate.HONOURED and self._engine == "mlx":
            raise _refusal(name, "this engine does not support it: leave it out")
        if field.make is None:
            self._raw[name] = value
            return
        self._add(name, _made(name, field.make, value))

    def _add(self, name: str, made: Json) -> None:
        """Set the fields that the client's field ``name`` stands for, unless they are set."""
        for ours, value in made.items():
            has = self._raw.get(ours)
            if has in ({"type": "text"}, []):
                has = None  # it asks for nothing
            if ours in _HOLDERS:
                self._check_alone(name)
            if isinstance(has, dict) and isinstance(value, dict):
                value = {**value, **has}
            elif has is not None or (ours in _LIMITS and self._has_limit()):
                continue
            self._raw[ours] = value
            self._names.setdefault(ours, name)
            self._names.setdefault(self._dialect.renames.get(ours, ours), name)

    def _has_limit(self) -> bool:
        return any(self._raw.get(name) is not None for name in _LIMITS)

    def _check_alone(self, name: str) -> None:
        """Raise ``InvalidRequest`` if the answer has a constraint already: two cannot be joined."""
        for ours in _HOLDERS:
            held = self._raw.get(ours)
            if held and held != {"type": "text"}:
                other = self._names.get(ours, ours)
                raise _refusal(name, f"an answer can have only one form: leave out it or {other}")


def _made(name: str, make: Make, value: Any) -> Json:
    """Return the fields that a field's value stands for. Raises ``InvalidRequest`` if invalid."""
    try:
        return make(value)
    except ValueError as error:
        raise _refusal(name, str(error)) from error


def _matters(value: object) -> bool:
    return value not in (None, 0, 1)


def _refusal(name: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {words}", name)


def renamed(message: str, param: str | None, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return an error's message and field, with the name that the client used for the field."""
    if param is None:
        return message, param
    theirs = names.get(param) or names.get(param.partition(".")[0].partition("[")[0])
    if theirs is None:
        return message, param
    if message.startswith(param):
        message = theirs + message.removeprefix(param)
    return message, theirs


# OpenAI's and Anthropic's own fields that change no answer here, in any dialect.
CHANGE_NOTHING: Final = frozenset(
    {"audio", "betas", "context_management", "conversation", "inference_geo", "metadata"}
    | {"moderation", "options", "parallel_tool_calls", "prediction", "previous_response_id"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    | {"service_tier", "speed", "store", "stream_options", "truncation", "user"}
    | {"user_profile_id", "verbosity", "web_search_options", "workspace_id"}
)
_ALIKE: Final = 0.88  # difflib's ratio of names that differ in one letter of eight, or two of 16
_SHORTEST: Final = 8  # shorter names too often resemble another by chance
_SHORT_WORD: Final = 3
_NOTHING: Final[tuple[object, ...]] = ("", [], {})  # values that ask for nothing
_MOST: Final = 16  # most unknown fields that are examined and named
_LONGEST: Final = 40


def unknown_fields(asked: Json, known: Collection[str], ours: Collection[str]) -> list[str]:
    """Return the names of unknown fields, in a form that a header can have.

    Args:
        known: all known names, those without effect included.
        ours: those among them that change an answer.

    Raises:
        InvalidRequest: a field looks like a misspelt one of ``ours``.
    """
    unknown = [x for x in asked if x not in known and asked[x] is not None][:_MOST]
    for name in unknown:
        meant = _meant(name[:_LONGEST], ours)
        if meant and asked.get(meant) is None and asked[name] not in _NOTHING:
            raise InvalidRequest(f"{name}: it is unknown here; did you mean {meant}?", name)
    return [re.sub(r"[^\w.-]", "?", x[:_LONGEST], flags=re.ASCII) for x in unknown]


def _meant(name: str, ours: Collection[str]) -> str:
    plain = {_plain(x): x for x in ours}
    if found := plain.get(_plain(name)):
        return found
    if len(name) < _SHORTEST:
        return ""
    near = [x for x in ours if len(x) >= _SHORTEST and _same_words(name, x)]
    close = get_close_matches(name, near, 1, _ALIKE)
    return close[0] if close else ""


def _same_words(name: str, ours: str) -> bool:
    """Return whether the words differ only in spelling; short ones, as min and max, must agree."""
    theirs, wanted = re.split("[_-]", name), ours.split("_")
    if len(theirs) != len(wanted) or re.findall(r"\d", name) != re.findall(r"\d", ours):
        return False
    return all(x == y or len(y) > _SHORT_WORD for x, y in zip(theirs, wanted, strict=True))


def _plain(name: str) -> str:
    return re.sub(r"[_-]", "", name).casefold()
