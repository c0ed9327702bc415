"""Divides a machine's memory among loaded models, and lends what others leave free.

Each model is guaranteed its part of the machine's budgets while it is loaded, from before its
engine starts until that has ended. What no loaded model is guaranteed is lent to loaded ones whose
engines can change their budgets while they run. A loan is counted before an engine learns of it,
and counted no more only once the engine has said that it holds to less: so all that engines may use
together is at no moment more than the machine's budgets, whichever of them dies meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from engines.base import Engine, EngineError, HasBudgets, Welcome

log = logging.getLogger("thermocline.gateway")
AGAIN_S: Final = 0.2  # until an engine that did not give memory back is asked once more


class Budget(NamedTuple):
    """Bytes for live KV, and for packed sessions in memory."""

    hot: int
    ram: int

    def plus(self, other: Budget) -> Budget:
        """Add another one up."""
        return Budget(self.hot + other.hot, self.ram + other.ram)

    def within(self, other: Budget) -> Budget:
        """Return the lesser of both, of each kind of memory."""
        return Budget(min(self.hot, other.hot), min(self.ram, other.ram))

    def fits(self, other: Budget) -> bool:
        """Say whether it is no more than another one."""
        return self.within(other) == self


NOTHING: Final = Budget(0, 0)


def total(parts: Iterable[Budget]) -> Budget:
    """Add budgets up."""
    hot, ram = zip(*parts, strict=True) if (parts := [*parts]) else ((), ())
    return Budget(sum(hot), sum(ram))


def loans(
    all_of_it: Budget, guaranteed: Iterable[Budget], shares: Mapping[str, int]
) -> dict[str, Budget]:
    """Divide what no loaded model is guaranteed among those that can take it.

    Args:
        all_of_it: of the machine.
        guaranteed: to each model that is loaded, or about to be.
        shares: of the models that can take more, by name.

    Returns:
        What each of them gets beside its own, in proportion to its share.
    """
    taken, num_shares = total(guaranteed), sum(shares.values())
    free = Budget(max(0, all_of_it.hot - taken.hot), max(0, all_of_it.ram - taken.ram))
    return {
        name: Budget(free.hot * share // num_shares, free.ram * share // num_shares)
        for name, share in shares.items()
    }


@dataclass(eq=False)
class Part:
    """One model's part of the machine's budgets. ``Lending`` is the only writer of the rest."""

    engine: Engine
    guaranteed: Budget
    share: int
    is_loaded: bool  # or about to be, or about to be no more
    lent: Budget = NOTHING  # the most that its engine may use beside its guaranteed part
    confirmed: Budget | None = NOTHING  # as its engine said last; None: that is not known
    life: Welcome | None = None  # of its engine, when that said so

    @property
    def borrows(self) -> bool:
        """True if its engine is there and can change its budgets."""
        welcome = self.engine.welcome
        can = self.is_loaded and isinstance(self.engine, HasBudgets)
        return can and welcome is not None and welcome.moves_budgets


class Lending:
    """Keeps account of the memory that each engine may use. Belongs to the event loop."""

    def __init__(self, all_of_it: Budget, parts: Mapping[str, Part]) -> None:
        """``parts``: by the names of the models."""
        self._all = all_of_it
        self._parts = dict(parts)
        self._turn = asyncio.Lock()

    @property
    def most_in_use(self) -> Budget:
        """The most that all engines together may use now."""
        held = [x.guaranteed.plus(x.lent) for x in self._parts.values() if x.is_loaded]
        return total(held)

    async def take_back(self, name: str) -> None:
        """Take back what is lent until a model's own part is free, and guarantee it."""
        if (part := self._parts.get(name)) is None:
            return
        part.is_loaded = True
        while True:
            async with self._turn:
                await self._settle()
            if self.most_in_use.fits(self._all):
                return
            await asyncio.sleep(AGAIN_S)

    def left(self, name: str) -> None:
        """Note that a model's engine has ended, and with it all that it used."""
        if (part := self._parts.get(name)) is not None:
            part.is_loaded = False
            part.lent, part.confirmed, part.life = NOTHING, NOTHING, None

    async def look(self) -> None:
        """Lend memory that is not needed now, and repeat to engines what they may have missed."""
        async with self._turn:
            await self._settle()

    async def _settle(self) -> None:
        """Take back first, then lend."""
        wanted = self._wanted()
        for name, part in self._parts.items():
            less = part.lent.within(wanted.get(name, NOTHING))
            if less != part.lent:
                await self._take(part, less)
        for name, part in self._parts.items():
            more = wanted.get(name, NOTHING)
            rest = total(
                x.guaranteed.plus(x.lent)
                for x in self._parts.values()
                if x.is_loaded and x is not part
            )
            may = part.is_loaded and part.guaranteed.plus(more).plus(rest).fits(self._all)
            if part.lent.fits(more) and may and more != part.lent:
                part.lent, part.confirmed = more, None
            if part.borrows and (
                part.confirmed != part.lent or part.life is not part.engine.welcome
            ):
                await self._confirm(part, part.lent)

    def _wanted(self) -> dict[str, Budget]:
        loaded = [x.guaranteed for x in self._parts.values() if x.is_loaded]
        return loans(self._all, loaded, {k: x.share for k, x in self._parts.items() if x.borrows})

    async def _take(self, part: Part, lent: Budget) -> None:
        # One that gave up has ended, and is not started again.
        if part.engine.gave_up or (part.borrows and await self._confirm(part, lent)):
            part.lent = lent

    async def _confirm(self, part: Part, lent: Budget) -> bool:
        """Have an engine hold to its guaranteed and lent memory; False: it may not have heard."""
        assert isinstance(part.engine, HasBudgets)
        wanted, life = part.guaranteed.plus(lent), part.engine.welcome
        part.confirmed = None
        try:
            await part.engine.set_budgets(wanted.hot, wanted.ram)
        except EngineError as error:
            log.info("an engine does not change its budgets yet: %s", error)
            return False
        if part.engine.welcome is not life:  # it may be another one by now
            return False
        part.confirmed, part.life = lent, life
        return True
