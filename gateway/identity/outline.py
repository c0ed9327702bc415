"""Hashes the parts of a request, and compares it with the previous request of its session.

Every message is encoded and hashed once, here; ``known_chats`` recognises chats by these hashes.
The comparison shows an operator which client changes its own prompt: in which part, at which
message, and how many tokens were reused. The memory is bounded in bytes; entries unused for longest
are dropped first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

DIGEST_BYTES: Final = 8
SAID_CHARS: Final = 200  # characters at an answer's beginning that are hashed
LAST_MESSAGES: Final = 4  # among which answers are hashed, too
Part: TypeAlias = Literal["model", "system", "tools", "messages"]
_encode = msgspec.json.Encoder(order="sorted").encode
CAPACITY_BYTES = 16 << 20
_ENTRY_BYTES = 400  # estimate of the objects around an outline's digests


class Outline(NamedTuple):
    """Hashes of a request's parts, under the tenant's salt."""

    model: bytes
    system: bytes  # b"" if there is none
    tools: bytes
    messages: bytes  # ``DIGEST_BYTES`` for each message after the system's, in order
    size: int = 0  # bytes of messages and tools as JSON

    @property
    def num_messages(self) -> int:
        return len(self.messages) // DIGEST_BYTES

    @property
    def nbytes(self) -> int:
        return 3 * DIGEST_BYTES + len(self.messages)


class PromptChange(NamedTuple):
    """The first part of a request that differs from the previous request of its session."""

    part: Part
    at_message: int  # the index of the first message that differs; 0 if another part changed


class HashedPart(NamedTuple):
    """A message, or all tools."""

    digest: bytes  # 16 bytes, under the tenant's salt
    nbytes: int  # as JSON
    said: bytes = b""  # hash of the text of an answer among the last messages; else b""


class HashedRequest(NamedTuple):
    """The hashes of a request's parts, each of one part alone."""

    model: bytes
    tools: HashedPart | None  # None: there are none
    messages: Sequence[HashedPart]
    has_system: bool  # the first message is the system's
    first_answer: int  # the index of the assistant's first message; ``len(messages)`` if none
    first_said: bytes  # hash of the text of that message; b"" if there is none
    first_calls: bytes  # its digest if it called tools, since ids of calls are random; else b""
    first_asked: bytes  # hash of the last text of the message before it; b"" if there is none

    @property
    def outline(self) -> Outline:
        """The shorter hashes that are kept to compare the session's next request with."""
        digests = [part.digest[:DIGEST_BYTES] for part in self.messages]
        tools = self.tools or HashedPart(b"", 0)
        return Outline(
            model=self.model,
            system=digests[0] if self.has_system else b"",
            tools=tools.digest[:DIGEST_BYTES],
            messages=b"".join(digests[self.has_system :]),
            size=sum(part.nbytes for part in self.messages) + tools.nbytes,
        )


def hashed(model: str, messages: Sequence[object], tools: object, salt: bytes) -> HashedRequest:
    """Hash a request's parts under ``salt``. A null field counts as absent, as clients vary."""
    roles = [x.get("role") if isinstance(x, Mapping) else "assistant" for x in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    answer = messages[first] if first < len(roles) else None
    parts = [_hashed(_encode(_without_nulls(message)), salt) for message in messages]
    for i in range(max(0, len(parts) - LAST_MESSAGES), len(parts)):
        if roles[i] == "assistant":
            parts[i] = parts[i]._replace(said=said(_text_of(messages[i])))
    has_calls = isinstance(answer, Mapping) and bool(answer.get("tool_calls"))
    return HashedRequest(
        _hashed(model.encode(), salt).digest[:DIGEST_BYTES],
        _hashed(_encode(tools), salt) if tools else None,
        parts,
        roles[0] in ("system", "developer"),
        first,
        said(_text_of(answer)),
        parts[first].digest if has_calls else b"",
        _asked(messages[first - 1], salt) if first else b"",
    )


def said(text: str) -> bytes:
    """Return the hash of an answer's first characters, without blanks; b"" if it is empty."""
    beginning = text.strip()[:SAID_CHARS]
    return hashlib.blake2b(beginning.encode(), digest_size=16).digest() if beginning else b""


def _text_of(message: object) -> str:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        content = "".join(str(x.get("text") or "") for x in content if isinstance(x, Mapping))
    return content if isinstance(content, str) else ""


def _asked(message: object, salt: bytes) -> bytes:
    """Return the hash of a question's last part, since clients put reminders before it."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list) and content:
        text = _text_of({"content": content[-1:]})
    else:
        text = _text_of(message)
    return _hashed(text.encode(), salt).digest if text else b""


def _hashed(written: bytes, salt: bytes) -> HashedPart:
    digest = hashlib.blake2b(written, digest_size=16, key=salt[:64]).digest()
    return HashedPart(digest, len(written))


def _without_nulls(message: object) -> object:
    """Drop null fields, with which SDKs send an assistant's message back; other clients do not."""
    if isinstance(message, dict) and None in message.values():
        return {key: value for key, value in message.items() if value is not None}
    return message


def change_between(before: Outline, now: Outline) -> PromptChange | None:
    """Return the first part that changed; None if ``now`` is a continuation of ``before``."""
    parts: tuple[Part, ...] = ("model", "system", "tools")
    for part in parts:
        if getattr(before, part) != getattr(now, part):
            return PromptChange(part, 0)
    if now.messages.startswith(before.messages):
        return None
    for at in range(0, len(before.messages), DIGEST_BYTES):
        if before.messages[at : at + DIGEST_BYTES] != now.messages[at : at + DIGEST_BYTES]:
            return PromptChange("messages", at // DIGEST_BYTES)
    raise AssertionError("``startswith`` has handled equal messages")


class Compared:
    """One request: its outline, its first change from the previous one, and token counts."""

    __slots__ = (
        "answer_tokens",
        "cached_tokens",
        "change",
        "is_ahead",
        "outline",
        "prompt_tokens",
    )

    def __init__(self, outline: Outline, change: PromptChange | None) -> None:
        self.outline = outline
        self.change = change
        self.prompt_tokens = 0  # all three are 0 until the engine reports them
        self.cached_tokens = 0
        self.answer_tokens = 0
        self.is_ahead = False  # True: it only prefills the prompt, and wants no answer


class PrefixReport(msgspec.Struct, frozen=True):
    """The figures of a session's latest request that the API shows to its owner."""

    changed: str | None  # model, system, tools or messages; None: it continued the previous one
    at_message: int | None  # index without the system message; None if no message changed
    num_messages: int
    prompt_tokens: int
    cached_tokens: int


class PrefixWatch:
    """The latest request of each session, and requests by the ids of their answers."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._capacity = capacity_bytes
        self._held: OrderedDict[tuple[str, str, str], Compared] = OrderedDict()
        self._nbytes = 0

    def compare(self, tenant: str, session_id: str, outline: Outline) -> Compared:
        """Compare a request with the previous one of its session, and remember the new one."""
        before = self._held.get(("session", tenant, session_id))
        change = change_between(before.outline, outline) if before else None
        compared = Compared(outline, change)
        self._put(("session", tenant, session_id), compared)
        return compared

    def latest(self, tenant: str, session_id: str) -> Outline | None:
        """Return the outline of a session's latest request; None if it is not remembered."""
        found = self._held.get(("session", tenant, session_id))
        return found.outline if found else None

    def answer_tokens(self, tenant: str, session_id: str) -> int | None:
        """Return the tokens of the latest request's answer; None if it is not remembered."""
        found = self._held.get(("session", tenant, session_id))
        if found is None:
            return None
        return 0 if found.is_ahead else found.answer_tokens

    def name(self, tenant: str, answer_id: str, compared: Compared) -> None:
        """Remember a request under the id of its answer."""
        self._put(("answer", tenant, answer_id), compared)

    def answered_as(self, tenant: str, answer_id: str) -> Compared | None:
        """Find a request by the id of its answer; None if it is not remembered."""
        return self._held.get(("answer", tenant, answer_id))

    def report(self, tenant: str, session_id: str) -> PrefixReport | None:
        """Return the report of a session's latest request; None if it is not remembered."""
        found = self._held.get(("session", tenant, session_id))
        if found is None:
            return None
        change = found.change
        return PrefixReport(
            changed=change.part if change else None,
            at_message=change.at_message if change and change.part == "messages" else None,
            num_messages=found.outline.num_messages,
            prompt_tokens=found.prompt_tokens,
            cached_tokens=found.cached_tokens,
        )

    def forget(self, tenant: str, session_id: str) -> None:
        """Drop the latest request of a session."""
        self._drop(("session", tenant, session_id))

    def _put(self, key: tuple[str, str, str], compared: Compared) -> None:
        self._drop(key)
        self._held[key] = compared
        self._nbytes += _ENTRY_BYTES + compared.outline.nbytes
        while self._nbytes > self._capacity:
            self._drop(next(iter(self._held)))

    def _drop(self, key: tuple[str, str, str]) -> None:
        found = self._held.pop(key, None)
        if found is not None:
            self._nbytes -= _ENTRY_BYTES + found.outline.nbytes
