"""What this server knows of one request, and what it holds for it; made by the middleware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from gateway.edge.bodies import BodyShare
from gateway.edge.key_limits import KeyShare
from gateway.edge.rates import Taken
from gateway.keys import Tenant

_NAME = "request"  # where the scope's state has it; ``gateway.errors`` reads the id there


@dataclass
class RequestState:
    """One request, until its answer has ended."""

    id: str
    headers: Mapping[str, str]  # by their names in lower case; of several the first
    body: BodyShare  # bytes in the budget of all bodies
    known: Tenant | None = None  # the owner of its key, before anything is charged
    taken: Taken = Taken()  # of its key's minute
    caller: Tenant | None = None  # set once it is charged
    place: KeyShare | None = None  # None: its route's cost counts in no key's limits
    session: str | None = None  # of its turn, for the log
    num_replaced: int = 0  # half characters in its body

    def used_tokens(self, number: int) -> None:
        """Count the tokens of a prompt and its answer in the key's minute."""
        if self.place is not None:
            self.place.used_tokens(number)

    def ended(self) -> None:
        """Give back what is held for it."""
        self.body.give_back()
        if self.place is not None:
            self.place.leave()


def begin(scope: Scope, state: RequestState) -> None:
    """Keep the state of a request where ``state_of`` finds it."""
    scope.setdefault("state", {})[_NAME] = state


def state_of(scope: Scope) -> RequestState:
    """Return the state of a request."""
    state = scope["state"][_NAME]
    assert isinstance(state, RequestState)
    return state
