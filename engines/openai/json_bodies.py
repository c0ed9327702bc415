"""Parses clients' JSON into a plain dict, and checks it against the fields of a struct.

An error is one sentence that begins with the field's name.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from engines.openai.errors import FieldError, InvalidRequest
from engines.openai.messages import Json

R = TypeVar("R", bound=msgspec.Struct)
_WHERE = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_FLOAT_GIVEN = re.compile(r"Expected `([^`]*)`, got `float`")
_MAX_WHOLE_FLOATS = 64  # integers written as 4.0 that one body may have
_MISSING = re.compile(r"missing required field `(\w+)`")
# The allowed values of fields, which msgspec's errors do not name.
_CHOICES = {
    "role": "use system, developer, user, assistant or tool",
    "tool_choice": "use none, auto, required or {type: function, function: {name}}",
    "response_format.type": "use text, json_object or json_schema",
    "reasoning_effort": "use none, minimal, low, medium, high, xhigh or max",
    "thinking.type": "use enabled, disabled or adaptive",
    "type": "only function is supported here",
}


def parse_json(body: bytes) -> Json:
    """Parse a body into a plain dict, for callers that also read fields outside the struct.

    Raises:
        InvalidRequest: it is not JSON, not an object, or nested too deeply.
    """
    try:
        raw = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidRequest("The JSON body is nested too deeply.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return raw


def decoded(body: bytes, decoder: msgspec.json.Decoder[R]) -> R:
    """Decode a body directly into a struct. Raises ``InvalidRequest``."""
    try:
        return decoder.decode(body)
    except RecursionError as error:
        raise InvalidRequest("The JSON body is nested too deeply.") from error
    except msgspec.ValidationError as error:
        raise _readable(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from error


def checked(raw: Json, kind: type[R]) -> R:
    """Return parsed JSON as a struct of ``kind``. Raises ``InvalidRequest``.

    Where ``kind`` has an integer, a number like ``4.0`` is accepted and changed to ``4`` in ``raw``
    as well: in JSON it is an integer, and some clients have no other numbers.
    """
    for _ in range(_MAX_WHOLE_FLOATS):
        try:
            return msgspec.convert(raw, kind)
        except RecursionError as error:
            raise InvalidRequest("The JSON body is nested too deeply.") from error
        except msgspec.ValidationError as error:
            if not _made_whole(raw, error):
                raise _readable(error) from error
    raise InvalidRequest("Too many integers are written as fractions, such as 4.0.")


def _made_whole(raw: Json, error: msgspec.ValidationError) -> bool:
    """Replace the float that an error is about by an equal integer; False if it has none."""
    found, expected = _WHERE.search(str(error)), _FLOAT_GIVEN.match(str(error))
    if found is None or expected is None or "int" not in expected[1].split(" | "):
        return False
    place: Any = raw
    steps = [int(x) if x.isdecimal() else x for x in re.findall(r"[^.\[\]]+", found[1])]
    try:
        for step in steps[:-1]:
            place = place[step]
        number = place[steps[-1]]
        if not (isinstance(number, float) and number.is_integer() and abs(number) < 2**53):
            return False
        place[steps[-1]] = int(number)
    except (LookupError, TypeError):  # a name with a dot in it
        return False
    return True


def _readable(error: msgspec.ValidationError) -> InvalidRequest:
    """Return msgspec's error as a sentence that begins with the field, which is also ``param``."""
    found = _WHERE.search(str(error))
    message = _WHERE.sub("", str(error))
    param = found.group(1) if found else ""
    missing = _MISSING.search(message)
    if isinstance(error.__cause__, FieldError):
        param = f"{param}.{error.__cause__.field}".lstrip(".")
    elif missing:
        param = f"{param}.{missing.group(1)}".lstrip(".")
        message = "it is required"
    elif message.startswith("Invalid enum value"):
        message = f"{message}; {_choices(param)}"
    return InvalidRequest(f"{param}: {message}" if param else message, param or None)


def _choices(param: str) -> str:
    return _CHOICES.get(param) or _CHOICES.get(param.rpartition(".")[2], "see OpenAI's reference")
