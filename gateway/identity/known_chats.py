"""Chats whose client gives no id, recognised by their messages.

A chat without an id is known by its *head*: the hash of its tools and all messages of its latest
request, chained message by message under the tenant's salt. The next request of that chat begins
with the same messages, so one of its chained hashes is the head; the last of them becomes the new
head. A repeated request finds its own head. A request that edits an older turn contains no head: it
is a fork, and gets an id of its own. A wrong guess costs no wrong token, since the engine compares
tokens, but the first chat would lose its id, its pin and its figures. So a session is taken over
only if at least half of it is the beginning of the new prompt.

Many chats begin with the same words. A first request that was answered and comes again begins
another chat. Of several chats that begin alike, a later request continues the one whose first
answer it contains, if the answers differ and are known; else the first of them that is quiet.

One kind of fork continues the session that it left, as every turn would otherwise leave an unused
session. There are two cases; in both the session has to be quiet:

- *Rewritten*: aider writes the last question again when the next one comes, and puts the files
  after the earlier messages. Such a request is longer than the one before it by an answer and a
  question, and shares all but the last few messages with it.
- *Resumed*: qwen-code, when restarted, leaves a reminder out of an older question, often the first.
  The system text, the last part of the first question and the first answer then identify the chat,
  if that answer called tools or is the only one so far.

In both cases the new request must also contain the session's latest answer in its place, since
chats of one program share their system text, and often the first question and its answer. Or both
requests must end with the same instruction, with a new turn before it: after each turn, qwen-code
asks what it should remember. An answer alone identifies no chat: many begin with the same greeting,
and some servers number the calls of each chat from zero.

The id of a new chat is derived from its first head. So after a restart the gateway finds a chat by
checking for which of its derived ids the engine still has a session. That works as long as the
first request is half of the session, as nothing is known of the later ones.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from gateway.identity.outline import HashedRequest, said
from gateway.keys import Tenant

DERIVED_PREFIX = "chat-"
_TURN = 2  # messages: an answer and a question
_REWRITTEN = 3  # messages at the end that may be rewritten: files, a note on them, the question
_LONG_BYTES = 256  # a longer message is a program's instruction, not a phrase of many chats
_BYTES_A_TOKEN = 4  # as most texts have at most

MAX_KNOWN_CHATS = 50_000  # for each tenant
MAX_TENANTS = 10_000  # a key may have any number of users; those quiet for longest are dropped
MAX_OF_ALL = 200_000  # as many as the table has rows
# Chats with the same first request that are told apart. A client that sends the same request over
# and over opens no more.
MAX_ALIKE = 8


class Link(NamedTuple):
    """One message of a chain: hashes of it, of all before it, and of the chat's first answer."""

    digest: bytes  # of the messages up to this one, and of the tools
    nbytes: int  # of these as JSON
    is_own: bool  # False: many chats may begin so, as there is no answer yet and no named group
    alone: bytes = b""  # hash of this message alone, if it is long; else b""
    answer: bytes = b""  # hash of its text if it is one of the last answers (``outline.said``)
    # These are set at the message before the chat's first answer, b"" elsewhere:
    said: bytes = b""  # hash of that answer's text
    calls: bytes = b""  # hash of that answer if it called tools (``outline.HashedRequest``)
    asked: bytes = b""  # hash of the last part of the question that it answers


class SessionsSeen(Protocol):
    """The sessions of one tenant, by their ids."""

    def exists(self, id: str) -> bool:
        """Return whether the session exists, also from before the gateway's start."""

    def is_quiet(self, id: str) -> bool:
        """Return whether the session exists and serves no request now."""

    def tokens_of(self, id: str) -> int:
        """Return the session's number of tokens; 0 if it does not exist."""

    def is_answered(self, id: str) -> bool:
        """Return whether its latest request was answered, and not only prefilled."""


def _is_taken(seen: SessionsSeen, id: str) -> bool:
    """Return whether the session's first request was answered, or is being served."""
    return seen.exists(id) and (seen.is_answered(id) or not seen.is_quiet(id))


class KnownChats:
    """The heads of chats that came without an id; those unused for longest are dropped first."""

    def __init__(self, capacity_per_tenant: int, capacity: int = MAX_OF_ALL) -> None:
        """
        Args:
            capacity_per_tenant: the most chats of one tenant.
            capacity: the most chats of all tenants together.
        """
        self._capacity_per_tenant = capacity_per_tenant
        self._capacity = capacity
        self._heads_of: dict[str, _Heads] = {}
        self._num_chats = 0

    def __len__(self) -> int:
        return self._num_chats

    def identify(self, tenant: Tenant, chain: Sequence[Link], seen: SessionsSeen) -> str:
        """Return the session id of a chat: that of a known one it continues, or a new id.

        Args:
            chain: ``message_chain`` of its messages.
            seen: the tenant's sessions.
        """
        heads = self._heads_of.pop(tenant.name, None) or _Heads(self._capacity_per_tenant)
        self._heads_of[tenant.name] = heads
        self._num_chats -= len(heads)
        session_id = (
            heads.take(chain, seen)
            or heads.rewritten(chain, seen)
            or heads.inherited(chain, seen)
            or heads.resumed(chain, seen)
            or heads.unused(chain[-1], seen)
        )
        heads.put(chain, session_id)
        self._num_chats += len(heads)
        self._make_room()
        return session_id

    def on_words(
        self, tenant: Tenant, session_id: str, chain: Sequence[Link]
    ) -> Callable[[str], None] | None:
        """Return a function to call with the answer's text, by which the chat is found later.

        None if that is not needed: the client named the session, or its group and a first message.
        """
        if not chain or (len(chain) == 1 and chain[-1].is_own):
            return None

        def note(words: str) -> None:
            if heads := self._heads_of.get(tenant.name):
                heads.answered(session_id, chain, said(words))

        return note

    def _make_room(self) -> None:
        """Drop all chats of the tenants that were quiet for longest, never of the latest one."""
        while len(self._heads_of) > MAX_TENANTS or (
            self._num_chats > self._capacity and len(self._heads_of) > 1
        ):
            self._num_chats -= len(self._heads_of.pop(next(iter(self._heads_of))))


class _Heads:
    """The heads of one tenant's chats: head to session ids, and back."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # More than one session only at the first request of chats that begin alike, oldest first.
        self._sessions_at: OrderedDict[bytes, list[str]] = OrderedDict()
        self._head_of: dict[str, Link] = {}
        self._said_in: dict[str, bytes] = {}  # hash of the answer to the latest request
        self._stems_of: dict[str, list[bytes]] = {}
        self._session_with: dict[bytes, str] = {}  # the latest session with a stem or root

    def __len__(self) -> int:
        return len(self._head_of)

    def answered(self, session_id: str, chain: Sequence[Link], said: bytes) -> None:
        """Note the answer's hash for a chat whose latest request has ``chain``."""
        head = self._head_of.get(session_id)
        if head is None or head.digest != chain[-1].digest:
            return
        self._said_in[session_id] = said
        if said and not head.is_own:
            self._name(session_id, [_root(chain, said)])

    def take(self, chain: Sequence[Link], seen: SessionsSeen) -> str | None:
        """Find the last head in the chain; remove it and return its session, None if none.

        For a first request that many chats may share, a new id, if all known ones are taken.
        """
        for link, after in zip(chain[::-1], [b"", *(x.answer for x in chain[::-1])], strict=False):
            found = self._sessions_at.get(link.digest)
            if found is None:
                continue
            if link.is_own or link is not chain[-1]:
                if not (fit := self._going_on(found, link, link.said or after, seen)):
                    continue
                session_id = next(filter(seen.is_quiet, fit), fit[0])
            elif len(found) < MAX_ALIKE and _is_taken(seen, found[-1]):
                return self.unused(link, seen)
            else:
                session_id = found[-1]
            self._drop(session_id)
            return session_id
        return None

    def _going_on(
        self, found: Sequence[str], link: Link, said: bytes, seen: SessionsSeen
    ) -> Sequence[str]:
        """Return the sessions at a head that a request may continue.

        Those whose answer the request contains; else those whose answer is not known; else those of
        which at least half is shared.

        Args:
            said: the hash of the answer that follows ``link`` in the request; b"" if not known.
        """
        known = {x: self._said_in.get(x, b"") for x in found}
        if not any(known.values()):
            return found
        return (
            [x for x in found if said and known[x] == said]
            or [x for x in found if not known[x]]
            or [x for x in found if _is_half(link, seen.tokens_of(x))]
        )

    def rewritten(self, chain: Sequence[Link], seen: SessionsSeen) -> str | None:
        """Remove and return the quiet session whose last messages this chain has rewritten."""
        for stem, i in _stems(chain[:-_TURN]):
            if session_id := self._left(stem, chain, chain[i], chain[i + _TURN].answer, seen):
                return session_id
        return None

    def resumed(self, chain: Sequence[Link], seen: SessionsSeen) -> str | None:
        """Remove and return the quiet session of a chat that changed an earlier question."""
        before = chain[:-_TURN]
        first = _first_calls(before) or (before[-1].said if before else b"")
        if not first:
            return None
        return self._left(_root(before, first), chain, before[0], chain[-_TURN].answer, seen)

    def _left(
        self,
        name: bytes,
        chain: Sequence[Link],
        shared: Link,
        answer: bytes,
        seen: SessionsSeen,
    ) -> str | None:
        """Remove and return the session with a stem or a root, if the chain may continue it.

        It must be quiet and share half of its latest request, and the chain must contain its latest
        answer or end with the same long message.

        Args:
            shared: the last message that both are known to have in common.
            answer: the hash of the answer that the chain has in place of the session's latest.
        """
        session_id = self._session_with.get(name)
        if session_id is None or not seen.is_quiet(session_id):
            return None
        head = self._head_of[session_id]
        has_answer = bool(answer) and self._said_in.get(session_id) == answer
        if not has_answer and not (head.alone and head.alone == chain[-1].alone):
            return None
        if 2 * shared.nbytes < head.nbytes:
            return None
        self._drop(session_id)
        return session_id

    def inherited(self, chain: Sequence[Link], seen: SessionsSeen) -> str | None:
        """Find a session from before a restart by its derived id, which no known chat may have."""
        for link in reversed(chain):
            session_id = _derived(link.digest)
            if session_id in self._head_of or not seen.exists(session_id):
                continue
            if link is chain[-1] and not link.is_own and _is_taken(seen, session_id):
                continue
            if _is_half(link, seen.tokens_of(session_id)):
                return session_id
        return None

    def unused(self, head: Link, seen: SessionsSeen) -> str:
        """Return an id for a new chat: the derived one, or a random one if that is in use."""
        session_id = _derived(head.digest)
        if session_id in self._head_of or seen.exists(session_id):
            session_id = _derived(head.digest + secrets.token_bytes(16))
        return session_id

    def put(self, chain: Sequence[Link], session_id: str) -> None:
        """Note the head of a chat; drop the chat unused for longest if there are too many."""
        head = chain[-1]
        self._sessions_at.setdefault(head.digest, []).append(session_id)
        self._sessions_at.move_to_end(head.digest)
        self._head_of[session_id] = head
        self._stems_of[session_id] = []
        self._name(session_id, [stem for stem, _ in _stems(chain)])
        if calls := _first_calls(chain):
            self._name(session_id, [_root(chain, calls)])
        if len(self._head_of) > self._capacity:
            self._drop(next(iter(self._sessions_at.values()))[0])

    def _name(self, session_id: str, names: Sequence[bytes]) -> None:
        self._stems_of[session_id] += names
        self._session_with.update(dict.fromkeys(names, session_id))

    def _drop(self, session_id: str) -> None:
        digest = self._head_of.pop(session_id).digest
        self._said_in.pop(session_id, None)
        alike = self._sessions_at[digest]
        alike.remove(session_id)
        if not alike:
            del self._sessions_at[digest]
        for stem in self._stems_of.pop(session_id):
            if self._session_with.get(stem) == session_id:
                del self._session_with[stem]


def _is_half(link: Link, num_tokens: int) -> bool:
    """Return whether the messages up to ``link`` are at least half of ``num_tokens`` tokens."""
    return 2 * link.nbytes >= _BYTES_A_TOKEN * num_tokens


def _stems(chain: Sequence[Link]) -> Iterator[tuple[bytes, int]]:
    """Yield the stems of a chain: hashes of all but its last few messages, and of its length.

    Each comes with the index of the last message in it. The first message alone is no stem, since
    many chats share a system prompt.
    """
    last, length = len(chain) - 2, len(chain).to_bytes(4)
    for i in range(last, max(0, last - _REWRITTEN), -1):
        yield chain[i].digest + length, i


def _root(chain: Sequence[Link], answer: bytes) -> bytes:
    """Return the root of a chain: its first message, length, and first question and answer."""
    asked = next((link.asked for link in chain if link.asked), b"")
    return chain[0].digest + len(chain).to_bytes(4) + asked + answer


def _first_calls(chain: Sequence[Link]) -> bytes:
    """Return the hash of a chain's first answer if that called tools; else b""."""
    return next((link.calls for link in chain if link.calls), b"")


def message_chain(request: HashedRequest, group: str | None = None) -> list[Link]:
    """Return the chained hashes of a request's messages, each of all messages up to it.

    The group and the tools are hashed first, so chats that differ in them share no digest.
    """
    links = []
    digest, nbytes = b"" if group is None else b"group" + group.encode(), 0
    if request.tools is not None:
        digest, nbytes = _joined(digest + b"tools", request.tools.digest), request.tools.nbytes
    for i, message in enumerate(request.messages):
        digest = _joined(digest, message.digest)
        nbytes += message.nbytes
        is_own = group is not None or i >= request.first_answer
        alone = message.digest if message.nbytes >= _LONG_BYTES else b""
        links.append(Link(digest, nbytes, is_own, alone, message.said))
    if request.first_answer:
        said, calls, asked = request.first_said, request.first_calls, request.first_asked
        last = request.first_answer - 1
        links[last] = links[last]._replace(said=said, calls=calls, asked=asked)
    return links


def _joined(before: bytes, digest: bytes) -> bytes:
    return hashlib.blake2b(before + digest, digest_size=16).digest()


def _derived(digest: bytes) -> str:
    return (
        DERIVED_PREFIX + hashlib.blake2b(digest, digest_size=12, person=b"session id").hexdigest()
    )
