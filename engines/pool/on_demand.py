"""A model that is loaded when it is asked for: its states, and who waits for it.

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
    """Says whether a model can be asked."""

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
    """The sessions of an engine, as far as loading asks of them; see ``scheduler.sessions``."""

    @property
    def settled(self) -> bool:
        """True once the engine has listed its sessions."""

    @property
    def memory_is_scarce(self) -> bool: ...

    def engine_unloaded(self, rests_in: TierName) -> None:
        """Note that all of them are cold now, in that tier."""


@dataclass(eq=False)
class OnDemand:
    """One model that is loaded when it is asked for. ``Loading`` is its only writer."""

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
    stays_until: float = float("-inf")  # for its own tenants
    began: float = 0.0  # to load
    took_s: float = 0.0  # to load, when it did last
    failed: str = ""  # why it could not be loaded
    num_failures: int = 0  # in a row
    refused_until: float = float("-inf")  # after them

    def to(self, state: LoadState) -> None:
        """Change the state, and log it."""
        assert state in _NEXT[self.state], f"{self.name}: {self.state.value} -> {state.value}"
        log.info("model %s: %s -> %s", self.name, self.state.value, state.value)
        self.state = state
