"""Applies the list of foreign fields to a request, in any dialect, and names unknown ones.

OpenAI refuses every unknown field. Here clients of other servers, and newer ones, go on working:
what is unknown is ignored, and named in the answer's head. Only where a field that changes the
answer was meant, and is not there under its right name, a request is refused.
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

# Fields of our chats that other dialects have not, or under another name.
CHAT_FIELDS: Final = (
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "min_tokens", "structured_outputs"),
    *("chat_template_kwargs", "response_format", "reasoning_effort"),
)
_OPTIONS: Final = "options"  # Ollama's group of fields: each counts as one of the body's
_IN_OPTIONS: Final = frozenset({*CHAT_FIELDS, "temperature", "top_p"})
_KNOWN: Final[Mapping[str, ForeignField]] = {field.name: field for field in FOREIGN_FIELDS}
_HOLDERS: Final = ("response_format", "structured_outputs")
_LIMITS: Final = ("max_tokens", "max_completion_tokens")


class Dialect(NamedTuple):
    """A kind of request, as far as foreign fields differ in it."""

    fields: tuple[str, ...]  # its own, which are no foreign ones
    shows: bool = False  # its answers are the engine's own: they show all that the engine reports
    renames: Mapping[str, str] = {}  # its names of a chat's fields, in errors


def take_foreign(asked: Json, raw: Json, dialect: Dialect, engine: str) -> dict[str, str]:
    """Honour the foreign fields of a request in the body for the engine, or refuse one.

    Returns the client's names of the fields of ``raw`` that were made of others.

    Args:
        asked: the client's body.
        raw: the body for the engine; foreign fields that it does not know are removed.
        engine: its kind; "" if it is not known yet.

    Raises:
        InvalidRequest: a field asks for something that is not done here; names it.
    """
    return _Taking(asked, raw, dialect, engine).take()


def ignored_fields(asked: Json, dialect: Dialect) -> list[str]:
    """List the fields of the client's body that this server does not know.

    Raises:
        InvalidRequest: a field seems to be a misspelt one that changes the answer.
    """
    ours, known = _known_fields(dialect.fields)
    return unknown_fields(asked, known, ours)


@cache
def _known_fields(own: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the fields that change the answer, and all that are known, of one dialect."""
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
                    continue  # of answers and results, which are sent again at every turn
                if field.name in message and field.asks(message[field.name]):
                    raise _refusal(f"messages[{i}].{field.name}", field.words)

    def _take(self, field: ForeignField, value: Any) -> None:
        name = field.name
        if name not in _LIMITS or self._raw.get(name) == value:  # else it is made of another
            self._raw.pop(name, None)
        if not field.asks(value) or field.fate is Fate.HINT:
            return
        if field.beside and not any(_matters(self._asked.get(x)) for x in field.beside):
            return
        if field.fate is Fate.REFUSED:
            raise _refusal(name, f"it cannot be done here: {field.words}")
        if field.fate is Fate.SHOWN_ON_VLLM and not self._dialect.shows:
            raise _refusal(name, "an answer of this kind cannot show it: leave it out")
        if field.fate is not Fate.HONOURED and self._engine == "mlx":
            raise _refusal(name, "this engine cannot do that: leave it out")
        if field.make is None:
            self._raw[name] = value
            return
        self._add(name, _made(name, field.make, value))

    def _add(self, name: str, made: Json) -> None:
        """Add fields to the body that the client's field means; its own fields go first."""
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
        """Refuse two constraints for one answer, of which one would be left out."""
        for ours in _HOLDERS:
            held = self._raw.get(ours)
            if held and held != {"type": "text"}:
                other = self._names.get(ours, ours)
                raise _refusal(name, f"an answer is held to one thing: leave out it or {other}")


def _made(name: str, make: Make, value: Any) -> Json:
    """Return what a field's value means. Raises ``InvalidRequest`` if it means nothing."""
    try:
        return make(value)
    except ValueError as error:
        raise _refusal(name, str(error)) from error


def _matters(value: object) -> bool:
    return value not in (None, 0, 1)


def _refusal(name: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {words}", name)


def renamed(message: str, param: str | None, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return an error's message and field with the client's own name of the field."""
    if param is None:
        return message, param
    theirs = names.get(param) or names.get(param.partition(".")[0].partition("[")[0])
    if theirs is None:
        return message, param
    if message.startswith(param):
        message = theirs + message.removeprefix(param)
    return message, theirs


# OpenAI's and Anthropic's own fields that change no answer here, in whatever dialect.
CHANGE_NOTHING: Final = frozenset(
    {"audio", "betas", "context_management", "conversation", "inference_geo", "metadata"}
    | {"moderation", "options", "parallel_tool_calls", "prediction", "previous_response_id"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    | {"service_tier", "speed", "store", "stream_options", "truncation", "user"}
    | {"user_profile_id", "verbosity", "web_search_options", "workspace_id"}
)
_ALIKE: Final = 0.88  # of two names, as difflib counts: one letter in eight, or two in sixteen
_SHORTEST: Final = 8  # shorter names are too often near another by chance
_SHORT_WORD: Final = 3
_NOTHING: Final[tuple[object, ...]] = ("", [], {})  # values that ask for nothing
_MOST: Final = 16  # of the fields that are named, and looked at
_LONGEST: Final = 40


def unknown_fields(asked: Json, known: Collection[str], ours: Collection[str]) -> list[str]:
    """List the fields that are unknown, as a header can name them.

    Args:
        known: all names that mean something, or are known to mean nothing.
        ours: those among them that change an answer.

    Raises:
        InvalidRequest: a field seems to be a misspelt one of ours.
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
    """Say whether the words differ in their spelling only: short ones, as min and max, may not."""
    theirs, wanted = re.split("[_-]", name), ours.split("_")
    if len(theirs) != len(wanted) or re.findall(r"\d", name) != re.findall(r"\d", ours):
        return False
    return all(x == y or len(y) > _SHORT_WORD for x, y in zip(theirs, wanted, strict=True))


def _plain(name: str) -> str:
    return re.sub(r"[_-]", "", name).casefold()
