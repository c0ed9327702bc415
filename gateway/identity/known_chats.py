"""Chats whose client gives no id, recognised by their messages.

A chat without an id is known by its *head*: the hash of its tools and all messages of its latest
request, chained message by message under the tenant's salt. The next request of that chat begins
with the same messages, so one of its chained hashes is the head; the head then moves on to the last
of them. The same request again finds its own head. A request that edits an older turn contains no
head: it is a fork, and gets an id of its own. A wrong guess costs no wrong token, since the engine
compares tokens, but the first chat would lose its id, its pin and its figures. So a session is
taken over only if at least half of it is the beginning of the new prompt.

Many chats begin with the same words. A first request that was answered and comes again begins
another chat; which of those that begin alike a request goes on with is seen by their first answers,
if these differ and are known. Else the first of them that is quiet has it.

One kind of fork goes on in the session that it left: aider writes the last question anew when the
next one comes, and puts the files after the earlier messages. Such a request is longer than the one
before it by an answer and a question, and shares all of it but the last few messages. It takes the
session over where that is quiet, or every turn would leave an unused session. qwen-code that is
started again leaves a reminder out of an older question, often the first: then the system text, the
last part of the first question and the first answer say that it is the same chat, if that called
tools, or is all that the chat had so far. In both cases the new request has the session's latest
answer in its place: chats of one program share their system text, and often the first question and
what it was answered with. Or both end with the same instruction, before which a turn was put: so
qwen-code asks, after each turn, what it should remember. An answer alone is no sign: many chats
are greeted alike, and some servers number calls from zero in each of them.

The id of a new chat is derived from its first head. So after a restart a chat is found again by
asking which of its derived ids the engine still has a session for, as long as that first request is
half of the session: what followed it is not known any more.
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
_TURN = 2  # an answer and a question
_REWRITTEN = 3  # messages at the end, at most: files, a word on them, and the question
_LONG_BYTES = 256  # of a message that is a program's instruction, and not a word that many say
_BYTES_A_TOKEN = 4  # of most texts at most, so that half of the bytes is half of the tokens

MAX_KNOWN_CHATS = 50_000  # for each tenant
MAX_TENANTS = 10_000  # a key may have any number of users; those that were quiet for longest go
MAX_OF_ALL = 200_000  # as many as the table has rows
# Chats that are distinguished before any of them goes on; a client that asks the same again and
# again opens no more of them.
MAX_ALIKE = 8


class Link(NamedTuple):
    """One message of a chain, together with all before it."""

    digest: bytes
    nbytes: int  # as JSON, with those before it and the tools
    is_own: bool  # False: without an answer or a named group, many chats may begin so
    alone: bytes = b""  # names the message without those before it, if it is long
    answer: bytes = b""  # names its text if it is an answer among the last (``outline.said``)
    said: bytes = b""  # names the answer after it if that is the chat's first
    calls: bytes = b""  # names the same answer if it called tools (``outline.HashedRequest``)
    asked: bytes = b""  # names what the question of that answer ends with


class SessionsSeen(Protocol):
    """The sessions of one tenant, by their ids."""

    def exists(self, id: str) -> bool:
        """Return whether there is one: so chats are found that began before the gateway did."""

    def is_quiet(self, id: str) -> bool:
        """Return whether there is one, of which nothing is being served."""

    def tokens_of(self, id: str) -> int:
        """Return the tokens of one; 0 if there is none."""

    def is_answered(self, id: str) -> bool:
        """Return whether its latest request was answered, and not only read ahead of time."""


def _is_taken(seen: SessionsSeen, id: str) -> bool:
    """Return whether a first request was answered, or is being served."""
    return seen.exists(id) and (seen.is_answered(id) or not seen.is_quiet(id))


class KnownChats:
    """The heads of chats that came without an id; the longest unused are forgotten first."""

    def __init__(self, capacity_per_tenant: int, capacity: int = MAX_OF_ALL) -> None:
        """``capacity``: of all tenants together."""
        self._capacity_per_tenant = capacity_per_tenant
        self._capacity = capacity
        self._heads_of: dict[str, _Heads] = {}
        self._num_chats = 0

    def __len__(self) -> int:
        return self._num_chats

    def identify(self, tenant: Tenant, chain: Sequence[Link], seen: SessionsSeen) -> str:
        """Find the session id of a chat, or give it a new one.

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
        """Return what notes an answer by which its chat is known again; None if it is no chat."""
        if not chain or (len(chain) == 1 and chain[-1].is_own):
            return None

        def note(words: str) -> None:
            if heads := self._heads_of.get(tenant.name):
                heads.answered(session_id, chain, said(words))

        return note

    def _make_room(self) -> None:
        """Forget the chats of tenants that were quiet for longest, but not of the latest one."""
        while len(self._heads_of) > MAX_TENANTS or (
            self._num_chats > self._capacity and len(self._heads_of) > 1
        ):
            self._num_chats -= len(self._heads_of.pop(next(iter(self._heads_of))))


class _Heads:
    """The heads of one tenant's chats: head to session ids, and back."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Several sessions only at the first request of chats that begin alike, in their order.
        self._sessions_at: OrderedDict[bytes, list[str]] = OrderedDict()
        self._head_of: dict[str, Link] = {}
        self._said_in: dict[str, bytes] = {}  # the answer to the latest request
        self._stems_of: dict[str, list[bytes]] = {}
        self._session_with: dict[bytes, str] = {}  # by stem or root; of several the latest

    def __len__(self) -> int:
        return len(self._head_of)

    def answered(self, session_id: str, chain: Sequence[Link], said: bytes) -> None:
        """Note the answer to the latest request of a chat; ``chain``: of that request."""
        head = self._head_of.get(session_id)
        if head is None or head.digest != chain[-1].digest:
            return
        self._said_in[session_id] = said
        if said and not head.is_own:
            self._name(session_id, [_root(chain, said)])

    def take(self, chain: Sequence[Link], seen: SessionsSeen) -> str | None:
        """Remove the head that lies furthest down the chain; return its session, if any."""
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
        """Return those of the sessions at a head that a request may go on with.

        Those that said what it says they did, else those of which that is not known, else those of
        which half is shared all the same. So are all if the request does not name what they said:
        it has many messages after it.
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
        """Find the quiet session whose last question this chain has written anew; remove it."""
        for stem, i in _stems(chain[:-_TURN]):
            if session_id := self._left(stem, chain, chain[i], chain[i + _TURN].answer, seen):
                return session_id
        return None

    def resumed(self, chain: Sequence[Link], seen: SessionsSeen) -> str | None:
        """Find the quiet session of a chat whose earlier question is written anew; remove it."""
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
        """Remove the session of a stem or a root if it is quiet and shares half with a chain.

        Args:
            shared: what both have in common, at least.
            answer: that the session gave last, unless it was asked the same then as now.
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
        """Find a session from before a restart. One whose head is known belongs to another chat."""
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
        """Make an id for a new chat. Of chats that begin alike only one gets the derived id."""
        session_id = _derived(head.digest)
        if session_id in self._head_of or seen.exists(session_id):
            session_id = _derived(head.digest + secrets.token_bytes(16))
        return session_id

    def put(self, chain: Sequence[Link], session_id: str) -> None:
        """Note the head of a chat; the longest unused one makes room."""
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
    """Yield what names a chain without its last few messages, and which is the last one left.

    The first message alone is no such name: chats often have it in common, a system prompt.
    """
    last, length = len(chain) - 2, len(chain).to_bytes(4)
    for i in range(last, max(0, last - _REWRITTEN), -1):
        yield chain[i].digest + length, i


def _root(chain: Sequence[Link], answer: bytes) -> bytes:
    """Name a chain by its first message, its length, and its first question and answer."""
    asked = next((link.asked for link in chain if link.asked), b"")
    return chain[0].digest + len(chain).to_bytes(4) + asked + answer


def _first_calls(chain: Sequence[Link]) -> bytes:
    """Return what names the first answer of a chain if it called tools; else b""."""
    return next((link.calls for link in chain if link.calls), b"")


def message_chain(request: HashedRequest, group: str | None = None) -> list[Link]:
    """Chain the hashes of a request's messages, each with all before it.

    Chats of different ``group`` or tools, which stand at a prompt's beginning, have no digest in
    common.
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
