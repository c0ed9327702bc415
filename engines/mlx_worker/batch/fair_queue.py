"""The queue of requests that wait for memory or a place, fair between tenants.

The tenant that was served least is next, and within a tenant its sessions take turns, short prompts
a little before long ones (``engines.host.fair_shares``). A tenant with a hundred requests delays
another's single one by one request, not by a hundred.

Who ran already and had to make way waits before the others of its own tenant, not of all; and of
every four of a tenant one is let in that has not begun, however many take turns with its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from engines.host.fair_shares import FRESH_EVERY, QueueLimit, next_of

T = TypeVar("T")


class _Tenant(Generic[T]):
    """All that waits of one tenant."""

    def __init__(self, length: Callable[[T], int]) -> None:
        self._length = length
        self._num_begun = 0
        self._num_back = 0  # of those that ran already, let in since one began
        self.back: deque[T] = deque()  # ran already; the one that made way first is first
        self.sessions: dict[str, deque[T]] = {}  # the one that had no turn for longest is first

    def queues(self) -> Iterable[deque[T]]:
        return (self.back, *self.sessions.values())

    def head(self) -> T:
        return self.back[0] if self._goes_back else self._fresh()

    @property
    def _goes_back(self) -> bool:
        return bool(self.back) and (not self.sessions or self._num_back < FRESH_EVERY - 1)

    def _fresh(self) -> T:
        return self.sessions[self._next_session()][0]

    def pop(self) -> T:
        return self._pop_back() if self._goes_back else self._pop_fresh()

    def take(self, item: T) -> bool:
        """Take out an item as ``pop`` would, even if those that ran already are next."""
        if self.back and self.back[0] is item:
            self._pop_back()
        elif self.sessions and self._fresh() is item:
            self._pop_fresh()
        else:
            return self.remove(item)
        return True

    def _pop_back(self) -> T:
        self._num_back += 1
        return self.back.popleft()

    def _pop_fresh(self) -> T:
        session = self._next_session()
        self._num_begun += 1
        self._num_back = 0
        queue = self.sessions.pop(session)
        item = queue.popleft()
        if queue:
            self.sessions[session] = queue
        return item

    def _next_session(self) -> str:
        def length(session: str) -> int:
            return self._length(self.sessions[session][0])

        return next_of(list(self.sessions), length, self._num_begun)

    def remove(self, item: T) -> bool:
        for queue in self.queues():
            if item in queue:
                queue.remove(item)
                self.sessions = {name: x for name, x in self.sessions.items() if x}
                return True
        return False

    def __len__(self) -> int:
        return sum(len(queue) for queue in self.queues())


def first_come(tenants: Iterable[str]) -> str:
    """Choose the tenant that has waited longest."""
    return next(iter(tenants))


class FairQueue(Generic[T]):
    """One queue per tenant and session, served in turns. Belongs to the owner thread."""

    def __init__(
        self,
        first: Callable[[Iterable[str]], str] = first_come,
        length: Callable[[T], int] = lambda item: 0,
    ) -> None:
        """Make an empty one.

        Args:
            first: chooses among the tenants that wait, the longest-waiting first.
            length: of an item, as ``fair_shares.length_class`` groups them.
        """
        self._first = first
        self._length = length
        self._tenants: dict[str, _Tenant[T]] = {}

    def __len__(self) -> int:
        return sum(len(x) for x in self._tenants.values())

    def items(self) -> list[T]:
        """Everything that waits, in no order that matters."""
        return [x for tenant in self._tenants.values() for queue in tenant.queues() for x in queue]

    def push(self, item: T, tenant: str, session: str) -> None:
        """Append ``item`` to the queue of its tenant and session."""
        self._of(tenant).sessions.setdefault(session, deque()).append(item)

    def push_back(self, item: T, tenant: str) -> None:
        """Put ``item``, which ran already, before all of its tenant that did not."""
        self._of(tenant).back.append(item)

    def _of(self, tenant: str) -> _Tenant[T]:
        return self._tenants.setdefault(tenant, _Tenant(self._length))

    def head(self) -> T | None:
        """The next item; stays the same until it is taken, or one comes that goes before it."""
        if not self._tenants:
            return None
        return self._tenants[self._first(self._tenants)].head()

    def heads(self) -> list[T]:
        """The next item of each tenant."""
        return [tenant.head() for tenant in self._tenants.values()]

    def pop(self) -> T:
        """Take the head out, and send its tenant and its session to the back."""
        name = self._first(self._tenants)
        tenant = self._tenants.pop(name)
        item = tenant.pop()
        if len(tenant):
            self._tenants[name] = tenant
        return item

    def take(self, item: T) -> bool:
        """Take out ``item``, a head of its tenant, as ``pop`` would; False if it is gone."""
        for name, tenant in self._tenants.items():
            if tenant.take(item):
                del self._tenants[name]
                if len(tenant):
                    self._tenants[name] = tenant
                return True
        return False

    def remove(self, item: T) -> bool:
        """Take ``item`` out, wherever it is; False if it does not wait here."""
        for name, tenant in self._tenants.items():
            if tenant.remove(item):
                if not len(tenant):
                    del self._tenants[name]
                return True
        return False


class Line(NamedTuple, Generic[T]):
    """The queue, and the limit on the requests that wait in it."""

    queue: FairQueue[T]
    limit: QueueLimit
