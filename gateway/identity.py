"""Which session a request belongs to.

First match wins: the ``X-Session-ID`` header, ``session_id``, ``prompt_cache_key``,
``conversation``, ``previous_response_id``, else the longest message prefix that is known of the
same tenant. So a client that sends nothing but messages has sessions too.

A chat without an id is known by its *head*: the hash of all messages of its latest request, chained
message by message under the tenant's salt. The next request of that chat starts with the very same
messages, so its chain passes through the head, and the head moves on. The same request again finds
its own head. An older turn that was edited passes through no head: it is a fork, and gets an id of
its own. A wrong guess costs nothing but a prefill, since the engine compares tokens.

The id of a new chat is derived from its first head, so after a restart a chat is found again by
asking which derived ids the engine still has a session for.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote, unquote_to_bytes

import msgspec

from engines.openai import InvalidRequest, Json
from gateway.keys import Tenant

SESSION_ID_HEADER = "x-session-id"
MAX_ID_BYTES = 256  # of UTF-8
DERIVED_PREFIX = "chat-"
_PLAIN = "!#$&'()*+,-./:;<=>?@[]^_`{|}~ "  # not encoded in headers, like letters and digits

_canonical = msgspec.json.Encoder(order="sorted")


def named_session(headers: Mapping[str, str], raw: Json) -> str | None:
    """The id that the client gave. Raises ``InvalidRequest`` where it cannot be one."""
    header = headers.get(SESSION_ID_HEADER)
    if header is not None:
        return checked_id(id_from_header(header), "X-Session-ID")
    for name in ("session_id", "prompt_cache_key", "conversation", "previous_response_id"):
        value = raw.get(name)
        if name == "conversation" and isinstance(value, dict):
            value = value.get("id")
        if value is not None:
            return checked_id(value, name)
    return None


def checked_id(value: object, where: str) -> str:
    """Ids end up in headers, logs and the engine's lists: printable and short. Else 400."""
    # Printable first: a lone surrogate is not, and could not be encoded.
    if isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) <= MAX_ID_BYTES:
        return value
    raise InvalidRequest(
        f"{where} must be a string of printable characters, 1 to {MAX_ID_BYTES} bytes of UTF-8.",
        where,
    )


def id_to_header(session_id: str) -> str:
    """Percent-encoded UTF-8; ids of plain ASCII (without %) stand as they are."""
    return quote(session_id, safe=_PLAIN)


def id_from_header(text: str) -> str:
    try:
        return unquote_to_bytes(text.encode("latin-1")).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("X-Session-ID must be (percent-encoded) UTF-8.") from error


class KnownChats:
    """The heads of chats that came without an id; the longest unused are forgotten first."""

    def __init__(self, capacity_per_tenant: int) -> None:
        self._capacity = capacity_per_tenant
        self._of: dict[str, _Heads] = {}

    def identify(
        self, tenant: Tenant, chain: Sequence[bytes], exists: Callable[[str], bool]
    ) -> str:
        """The session id of a chat, known or new; ``chain`` is ``message_chain`` of its messages.

        ``exists`` tells whether the tenant has a session of that id: asked for chats of before a
        restart.
        """
        heads = self._of.setdefault(tenant.name, _Heads(self._capacity))
        session_id = heads.take(chain) or heads.inherited(chain, exists) or heads.unused(chain[-1])
        heads.put(chain[-1], session_id)
        return session_id


class _Heads:
    """One tenant's: head -> session id, and back."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._session_at: OrderedDict[bytes, str] = OrderedDict()
        self._head_of: dict[str, bytes] = {}

    def take(self, chain: Sequence[bytes]) -> str | None:
        """The session whose head lies furthest down the chain; the head is removed."""
        for digest in reversed(chain):
            session_id = self._session_at.pop(digest, None)
            if session_id is not None:
                del self._head_of[session_id]
                return session_id
        return None

    def inherited(self, chain: Sequence[bytes], exists: Callable[[str], bool]) -> str | None:
        """A session of before the restart. One whose head is known is somebody else's by now."""
        for digest in reversed(chain):
            session_id = _derived(digest)
            if session_id not in self._head_of and exists(session_id):
                return session_id
        return None

    def unused(self, head: bytes) -> str:
        """Two chats may begin alike: only the first of them gets the id that can be derived."""
        session_id = _derived(head)
        if session_id in self._head_of:
            session_id = _derived(head + secrets.token_bytes(16))
        return session_id

    def put(self, head: bytes, session_id: str) -> None:
        self._session_at[head] = session_id
        self._head_of[session_id] = head
        if len(self._session_at) > self._capacity:
            _, oldest = self._session_at.popitem(last=False)
            del self._head_of[oldest]


def message_chain(salt: bytes, messages: Sequence[object]) -> list[bytes]:
    """One digest per message, of it and all before it, under the tenant's ``salt``."""
    digests = []
    digest = b""
    for message in messages:
        step = hashlib.blake2b(digest, key=salt[:64], digest_size=16)
        step.update(_canonical.encode(_without_nulls(message)))
        digest = step.digest()
        digests.append(digest)
    return digests


def _without_nulls(message: object) -> object:
    """SDKs echo an assistant's message with its empty fields, other clients without them."""
    if isinstance(message, dict):
        return {key: value for key, value in message.items() if value is not None}
    return message


def _derived(digest: bytes) -> str:
    return (
        DERIVED_PREFIX + hashlib.blake2b(digest, digest_size=12, person=b"session id").hexdigest()
    )
