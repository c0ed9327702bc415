"""The wish for capacity in people's words. Frozen; ``launch.capacity`` turns it into budgets."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class CapacityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of capacity: how many sessions are to be kept, and how long each may grow."""

    sessions: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # 0 = no wish
    context: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0  # tokens of each
    on_demand: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # such models that are loaded at once

    def __post_init__(self) -> None:
        if bool(self.sessions) != bool(self.context):
            raise ValueError(
                "sessions and context belong together: how many sessions"
                " (--sessions 200), and of how many tokens each (--context 8192)"
            )
