"""The script of a request to the fake engine: the answer's speed, length and faults.

A request says so in OpenAI's own ``metadata`` field, as words of the form ``key=value``:

    {"metadata": {"fake": "chunks=200 delay_s=0.01 fault=die after=3"}}
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from engines.openai.requests import InvalidRequest

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Fault: TypeAlias = Literal[
    "",
    "die",  # SIGKILL to itself
    "cut",  # the connection is closed inside an event
    "hang",  # nothing more comes
    "no-done",  # a clean end without [DONE]
    "garbage",  # bytes that are no events
    "error-event",  # the engine reports an error in the stream, and ends it
    "plain-500",  # an error that is not in OpenAI's shape
    "error-400",
    "bytes",  # the stream comes byte by byte
]


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wishes of one request."""

    chunks: Count | None = None  # words in the answer; None = as many as the echo has
    head_s: Seconds = 0.0  # before the response head
    delay_s: Seconds = 0.0  # before every chunk
    after: Count = 0  # chunks that are sent before the fault
    fault: Fault = ""


def read_script(raw: dict[str, Any]) -> Script:
    """Read the script in a request's body. Raises ``InvalidRequest`` for a misspelt one."""
    metadata = raw.get("metadata")
    words = metadata.get("fake", "") if isinstance(metadata, dict) else ""
    pairs = dict(word.partition("=")[::2] for word in str(words).split())
    try:
        return msgspec.convert(pairs, Script, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"metadata.fake: {error}", "metadata") from error
