"""Chats whose client gives no id, recognised by their messages.

A chat without an id is known by its *head*: the hash of all messages of its latest request, chained
message by message under the tenant's salt. The next request of that chat begins with the same
messages, so one of its chained hashes is the head; the head then moves on to the last of them. The
same request again finds its own head. A request that edits an older turn contains no head: it is a
fork, and gets an id of its own. A wrong guess costs nothing but a prefill, since the engine
compares tokens.

The id of a new chat is derived from its first head. So after a restart a chat is found again by
asking which of its derived ids the engine still has a session for.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from gateway.keys import Tenant

DERIVED_PREFIX = "chat-"

_canonical = msgspec.json.Encoder(order="sorted")


class KnownChats:
    """The heads of chats that came without an id; the longest unused are forgotten first."""

    def __init__(self, capacity_per_tenant: int) -> None:
        self._capacity = capacity_per_tenant
        self._heads_of: dict[str, _Heads] = {}

    def identify(
        self, tenant: Tenant, chain: Sequence[bytes], exists: Callable[[str], bool]
    ) -> str:
        """Find the session id of a chat, or give it a new one.

        Args:
            chain: ``message_chain`` of its messages.
            exists: tells whether the tenant has a session of that id; this is how chats are found
                that began before the gateway was restarted.
        """
        heads = self._heads_of.setdefault(tenant.name, _Heads(self._capacity))
        session_id = heads.take(chain) or heads.inherited(chain, exists) or heads.unused(chain[-1])
        heads.put(chain[-1], session_id)
        return session_id


class _Heads:
    """The heads of one tenant's chats: head to session id, and back."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._session_at: OrderedDict[bytes, str] = OrderedDict()
        self._head_of: dict[str, bytes] = {}

    def take(self, chain: Sequence[bytes]) -> str | None:
        """Remove the head that lies furthest down the chain; return its session, if any."""
        for digest in reversed(chain):
            session_id = self._session_at.pop(digest, None)
            if session_id is not None:
                del self._head_of[session_id]
                return session_id
        return None

    def inherited(self, chain: Sequence[bytes], exists: Callable[[str], bool]) -> str | None:
        """Find a session from before a restart. One whose head is known belongs to another chat."""
        for digest in reversed(chain):
            session_id = _derived(digest)
            if session_id not in self._head_of and exists(session_id):
                return session_id
        return None

    def unused(self, head: bytes) -> str:
        """Make an id for a new chat. Of chats that begin alike only one gets the derived id."""
        session_id = _derived(head)
        if session_id in self._head_of:
            session_id = _derived(head + secrets.token_bytes(16))
        return session_id

    def put(self, head: bytes, session_id: str) -> None:
        """Note the head of a chat; the longest unused one makes room."""
        self._session_at[head] = session_id
        self._head_of[session_id] = head
        if len(self._session_at) > self._capacity:
            _, oldest = self._session_at.popitem(last=False)
            del self._head_of[oldest]


def message_chain(salt: bytes, messages: Sequence[object], group: str | None = None) -> list[bytes]:
    """Hash every message together with all before it, under the tenant's ``salt``.

    Gives one digest of 16 bytes per message. Chats of different ``group`` have no digest in common.
    """
    digests = []
    digest = b"" if group is None else b"group" + group.encode()
    for message in messages:
        step = hashlib.blake2b(digest, key=salt[:64], digest_size=16)
        step.update(_canonical.encode(_without_nulls(message)))
        digest = step.digest()
        digests.append(digest)
    return digests


def _without_nulls(message: object) -> object:
    """Drop null fields: SDKs echo an assistant's message with them, other clients without."""
    if isinstance(message, dict):
        return {key: value for key, value in message.items() if value is not None}
    return message


def _derived(digest: bytes) -> str:
    return (
        DERIVED_PREFIX + hashlib.blake2b(digest, digest_size=12, person=b"session id").hexdigest()
    )
