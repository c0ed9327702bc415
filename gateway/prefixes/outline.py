"""A request as hashes of its parts, so that two of a session can be compared without their text."""

from __future__ import annotations

import hashlib
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from engines.openai.requests import Json

DIGEST_BYTES: Final = 8
Part: TypeAlias = Literal["model", "system", "tools", "messages"]
_encode = msgspec.json.Encoder().encode


class Outline(NamedTuple):
    """Hashes of a request's parts, under the tenant's salt."""

    model: bytes
    system: bytes  # b"" if there is none
    tools: bytes
    messages: bytes  # ``DIGEST_BYTES`` for each message after the system's, in order
    size: int = 0  # of messages and tools as JSON, in bytes

    @property
    def num_messages(self) -> int:
        return len(self.messages) // DIGEST_BYTES

    @property
    def nbytes(self) -> int:
        return 3 * DIGEST_BYTES + len(self.messages)


class Change(NamedTuple):
    """The first part in which a request does not go on where the one before ended."""

    part: Part
    at_message: int  # the first of ``messages`` that differs; 0 where another part changed


def outline_of(raw: Json, salt: bytes) -> Outline:
    """Hash the parts of a chat that engines know."""
    messages = raw.get("messages") or []
    parts = [_encode(message) for message in messages]
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    tools = _encode(raw.get("tools"))
    return Outline(
        model=_digest(_encode(raw.get("model")), salt),
        system=_digest(parts[0], salt) if has_system else b"",
        tools=_digest(tools, salt),
        messages=b"".join([_digest(part, salt) for part in parts[has_system:]]),
        size=sum(map(len, parts)) + len(tools),
    )


def _digest(part: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(part, digest_size=DIGEST_BYTES, key=salt[:64]).digest()


def change_between(before: Outline, now: Outline) -> Change | None:
    """Name the first part that changed; None if ``now`` goes on where ``before`` ended."""
    parts: tuple[Part, ...] = ("model", "system", "tools")
    for part in parts:
        if getattr(before, part) != getattr(now, part):
            return Change(part, 0)
    if now.messages.startswith(before.messages):
        return None
    for at in range(0, len(before.messages), DIGEST_BYTES):
        if before.messages[at : at + DIGEST_BYTES] != now.messages[at : at + DIGEST_BYTES]:
            return Change("messages", at // DIGEST_BYTES)
    raise AssertionError("equal messages are a beginning of themselves")
