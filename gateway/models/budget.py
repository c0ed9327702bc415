"""Divides a machine's memory among the models that are loaded. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple


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
