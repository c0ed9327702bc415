"""A model that is loaded on demand: its states, and the requests that wait for it.

unloaded --start--> loading --ready--> loaded --stop--> unloading --ended--> unloaded
                       '------failed----------------------^
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from engines.base import Engine, TierName

log = logging.getLogger("thermocline.engines")


class LoadState(Enum):
    """The states of a model on demand."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


_NEXT: Final = {
    LoadState.UNLOADED: (LoadState.LOADING,),
    LoadState.LOADING: (LoadState.LOADED, LoadState.UNLOADING),
    LoadState.LOADED: (LoadState.UNLOADING,),
    LoadState.UNLOADING: (LoadState.UNLOADED,),
}


class Waiting(NamedTuple):
    """A request that waits for a model to be loaded."""

    tenant: str
    future: asyncio.Future[None]
    since: float


class EngineSessions(Protocol):
    """The part of ``scheduler.sessions.SessionManager`` that ``Loading`` uses."""

    @property
    def settled(self) -> bool:
        """True once the engine has listed its sessions."""

    @property
    def memory_is_scarce(self) -> bool: ...

    def engine_unloaded(self, rests_in: TierName) -> None:
        """Record that the engine has ended and that all sessions are cold, in ``rests_in``."""


@dataclass(eq=False)
class OnDemand:
    """One model on demand. Only ``Loading`` changes it."""

    name: str
    engine: Engine
    sessions: EngineSessions
    unload_after_s: float  # without a request
    load_timeout_s: float
    rests_in: TierName  # the tier that outlives the engine
    state: LoadState = LoadState.UNLOADED
    num_uses: int = 0  # requests that need it loaded
    last_used: float = 0.0
    waiting: list[Waiting] = field(default_factory=list)
    was_listed: bool = False  # its engine has listed its sessions since this server began
    users: set[str] = field(default_factory=set)  # tenants that used it since it was loaded
    stays_until: float = float("-inf")  # not unloaded for other tenants before
    began: float = 0.0  # when its latest load began
    took_s: float = 0.0  # its latest load
    failed: str = ""  # why it could not be loaded
    num_failures: int = 0  # in a row
    refused_until: float = float("-inf")  # after failures

    def to(self, state: LoadState) -> None:
        """Change the state, and log it."""
        assert state in _NEXT[self.state], f"{self.name}: {self.state.value} -> {state.value}"
        log.info("model %s: %s -> %s", self.name, self.state.value, state.value)
        self.state = state
