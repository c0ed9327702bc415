"""Chats whose client gives no id, recognised by their messages.

A chat without an id is known by its *head*: the hash of all messages of its latest request, chained
message by message under the tenant's salt. The next request of that chat begins with the same
messages, so one of its chained hashes is the head; the head then moves on to the last of them. The
same request again finds its own head. A request that edits an older turn contains no head: it is a
fork, and gets an id of its own. A wrong guess costs nothing but a prefill, since the engine
compares tokens.

One kind of fork goes on in the session that it left: aider writes the last question anew when the
next one comes, and puts the files after the earlier messages. Such a request is longer than the one
before it by an answer and a question, and shares all of it but the last few messages. It takes the
session over where that is quiet, or every turn would leave an unused session.

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
_TURN = 2  # an answer and a question
_REWRITTEN = 3  # messages at the end, at most: files, a word on them, and the question

MAX_KNOWN_CHATS = 50_000  # for each tenant

_canonical = msgspec.json.Encoder(order="sorted")


class KnownChats:
    """The heads of chats that came without an id; the longest unused are forgotten first."""

    def __init__(self, capacity_per_tenant: int) -> None:
        self._capacity = capacity_per_tenant
        self._heads_of: dict[str, _Heads] = {}

    def identify(
        self,
        tenant: Tenant,
        chain: Sequence[bytes],
        exists: Callable[[str], bool],
        is_quiet: Callable[[str], bool] = lambda session_id: False,
    ) -> str:
        """Find the session id of a chat, or give it a new one.

        Args:
            chain: ``message_chain`` of its messages.
            exists: says whether the tenant has a session of that id; this is how chats are found
                that began before the gateway was restarted.
            is_quiet: says whether nothing of a session is being served.
        """
        heads = self._heads_of.setdefault(tenant.name, _Heads(self._capacity))
        session_id = (
            heads.take(chain)
            or heads.rewritten(chain, is_quiet)
            or heads.inherited(chain, exists)
            or heads.unused(chain[-1])
        )
        heads.put(chain, session_id)
        return session_id


class _Heads:
    """The heads of one tenant's chats: head to session id, and back."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._session_at: OrderedDict[bytes, str] = OrderedDict()
        self._head_of: dict[str, bytes] = {}
        self._stems_of: dict[str, Sequence[bytes]] = {}
        self._session_with: dict[bytes, str] = {}  # by stem; of several the latest

    def take(self, chain: Sequence[bytes]) -> str | None:
        """Remove the head that lies furthest down the chain; return its session, if any."""
        for digest in reversed(chain):
            session_id = self._session_at.pop(digest, None)
            if session_id is not None:
                self._drop(session_id)
                return session_id
        return None

    def rewritten(self, chain: Sequence[bytes], is_quiet: Callable[[str], bool]) -> str | None:
        """Find the quiet session whose last question this chain has written anew; remove it."""
        for stem in _stems(chain[:-_TURN]):
            session_id = self._session_with.get(stem)
            if session_id is not None and is_quiet(session_id):
                del self._session_at[self._head_of[session_id]]
                self._drop(session_id)
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

    def put(self, chain: Sequence[bytes], session_id: str) -> None:
        """Note the head of a chat; the longest unused one makes room."""
        self._session_at[chain[-1]] = session_id
        self._head_of[session_id] = chain[-1]
        self._stems_of[session_id] = _stems(chain)
        self._session_with.update(dict.fromkeys(self._stems_of[session_id], session_id))
        if len(self._session_at) > self._capacity:
            _, oldest = self._session_at.popitem(last=False)
            self._drop(oldest)

    def _drop(self, session_id: str) -> None:
        del self._head_of[session_id]
        for stem in self._stems_of.pop(session_id):
            if self._session_with.get(stem) == session_id:
                del self._session_with[stem]


def _stems(chain: Sequence[bytes]) -> Sequence[bytes]:
    """Return what names a chain without its last few messages, together with its length.

    The first message alone is no such name: chats often have it in common, a system prompt.
    """
    last, length = len(chain) - 2, len(chain).to_bytes(4)
    return [chain[i] + length for i in range(last, max(0, last - _REWRITTEN), -1)]


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
