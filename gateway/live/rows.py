"""Makes what is shown of a session out of its row in the scheduler's table and its past."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import UNSET

from gateway.live.history import Histories
from gateway.live.shape import GoneShown, SessionShown
from scheduler.session import Session, State
from scheduler.table import SessionTable

Key = tuple[str, str]  # tenant and id
_LEAST_TOKENS = 32  # fewer tell little of what a token takes


class KvSize:
    """The bytes that a token takes unpacked: what the engine says, else as seen in hot sessions."""

    def __init__(self) -> None:
        self.told = 0  # by the engine; 0: it did not say
        self._seen = 0.0

    def learn(self, session: Session) -> None:
        """Learn from a quiet hot session."""
        if session.state is State.IDLE and session.tokens >= _LEAST_TOKENS and session.hot_bytes:
            self._seen = session.hot_bytes / session.tokens

    def of(self, tokens: int) -> int | None:
        """Return the bytes of so many tokens; None while nobody knows."""
        per_token = self.told or self._seen
        return round(tokens * per_token) if per_token else None


class Rows:
    """Shows rows of the table. Belongs to the event loop."""

    def __init__(
        self,
        table: SessionTable,
        histories: Histories,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """``clock`` is the scheduler's."""
        self._table = table
        self._histories = histories
        self._clock = clock
        self._wall = wall
        self.kv_size = KvSize()

    def session(self, key: Key) -> Session | None:
        """Find a row that may be shown; None if it is gone or leaving."""
        session = self._table.row(*key)
        return None if session is None or session.state is State.LEAVING else session

    def keys(self, tenant: str | None) -> list[Key]:
        """List the names of a tenant's sessions; of all for None."""
        return [(x.ref.tenant, x.ref.id) for x in self._of(tenant)]

    def latest(self, tenant: str | None, most: int) -> list[Key]:
        """List the names of those used last, the latest first."""
        found = sorted(self._of(tenant), key=lambda x: -x.last_used)
        return [(x.ref.tenant, x.ref.id) for x in found[:most]]

    def _of(self, tenant: str | None) -> Iterable[Session]:
        rows = self._table if tenant is None else self._table.of(tenant)
        return (x for x in rows if x.state is not State.LEAVING)

    def shown(self, session: Session, *, admin: bool) -> SessionShown:
        """Show a row; with its tenant for an admin."""
        key = (session.ref.tenant, session.ref.id)
        past = self._histories.of(key)
        last = past.turns[-1] if past and past.turns else None
        unpacked = self.kv_size.of(session.cold_tokens)
        return SessionShown(
            id=session.ref.id,
            tenant=session.ref.tenant if admin else UNSET,
            client=last.client if last else None,
            parent=session.parent,
            kind="child" if session.is_child else "main",
            state=session.state.value,
            tier=session.tier,
            tokens=session.tokens,
            bytes=session.hot_bytes if session.hot else session.cold_bytes,
            cold_bytes=session.cold_bytes,
            bf16_bytes=self.kv_size.of(session.tokens),
            ratio=(
                round(unpacked / session.cold_bytes, 2) if unpacked and session.cold_bytes else None
            ),
            idle_since=None if session.num_turns else self._unix(session.last_used),
            pinned=session.pinned,
            last_source=last.source if last else None,
            last_reason=last.reason if last else None,
            saved_s=round(past.saved_s, 3) if past else 0.0,
            turns=past.num_turns if past else 0,
            retain_until=self._retained(session),
        )

    def gone(self, key: Key, *, admin: bool) -> GoneShown:
        return GoneShown(id=key[1], tenant=key[0] if admin else UNSET)

    def _retained(self, session: Session) -> float | None:
        wanted = session.retain_until > self._clock()
        return self._unix(session.retain_until) if wanted else None

    def _unix(self, reading: float) -> float:
        """Turn a reading of the scheduler's clock into Unix time."""
        return round(self._wall() + reading - self._clock(), 1)
