"""One session as the sessions API shows it to its owner."""

from __future__ import annotations

import msgspec

from engines.base import TierName
from scheduler.session import Session


class SessionView(msgspec.Struct, frozen=True):
    """A row without its private fields."""

    id: str
    state: str
    tier: TierName | None  # slowest tier that a restore reads; None = no cold copy
    tokens: int
    bytes: int  # hot bytes while hot, packed bytes while cold
    idle_s: float
    pinned: bool
    kind: str  # main, or child of another session
    parent: str | None
    retain_s: float  # for how much longer its client asks to keep it


def view_of(session: Session, now: float) -> SessionView:
    """Make the view of a row; ``now`` is a reading of the scheduler's clock."""
    return SessionView(
        id=session.ref.id,
        state=session.state.value,
        tier=session.tier,
        tokens=session.tokens,
        bytes=session.hot_bytes if session.hot else session.cold_bytes,
        idle_s=0.0 if session.num_turns else round(max(0.0, now - session.last_used), 3),
        pinned=session.pinned,
        kind="child" if session.is_child else "main",
        parent=session.parent,
        retain_s=round(max(0.0, session.retain_until - now), 3),
    )
