"""Puts those that wait in order: short before long within a tenant, for a while; tenants fairly.

Within a tenant, of every four that begin three are the shortest of those that wait, and the fourth
is the one that has waited longest. So a short prompt is not kept by ten long ones, and a long one
begins at the latest when four have begun for each that came before it, however many short ones
come. Prompts of about the same length keep the order in which they came.

Between tenants ``FairShares`` says who is next; ``in_fair_order`` asks it for a whole line at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from engines.host.fair_shares import QUANTUM, FairShares

T = TypeVar("T")

OLDEST_EVERY: Final = 4
# Of so many of a tenant that come in while its rows take turns, one is a prompt that has not begun.
FRESH_EVERY: Final = 4
# An answer of so many tokens is a long one: it makes way for requests of its own tenant that have
# not begun.
LONG_ANSWER: Final = int(4 * QUANTUM)
# Prompts below it are all equally short; from here on each doubling is another length.
SHORT_TOKENS: Final = 512


def length_class(num_tokens: int) -> int:
    """Return 0 for a short prompt, and one more for each doubling of a longer one."""
    return (num_tokens // SHORT_TOKENS).bit_length()


def next_of(line: Sequence[T], length: Callable[[T], int], num_begun: int) -> T:
    """Return who is next of a tenant's line.

    Args:
        line: those that wait, the oldest first; not empty.
        length: their lengths, as ``length_class`` groups them.
        num_begun: how many of this tenant have begun so far.
    """
    if num_begun % OLDEST_EVERY == OLDEST_EVERY - 1:
        return line[0]
    return min(line, key=length)


def in_turns(line: Sequence[T], length: Callable[[T], int], num_begun: int) -> list[T]:
    """Return a tenant's whole line in the order in which ``next_of`` would choose them."""
    lengths = [length(x) for x in line]
    if len(set(lengths)) < 2:
        return list(line)
    by_length = sorted(range(len(line)), key=lengths.__getitem__)
    shortest, oldest = iter(by_length), iter(range(len(line)))
    order: list[int] = []
    gone: set[int] = set()
    for number in range(num_begun, num_begun + len(line)):
        left = oldest if number % OLDEST_EVERY == OLDEST_EVERY - 1 else shortest
        chosen = next(i for i in left if i not in gone)
        gone.add(chosen)
        order.append(chosen)
    return [line[i] for i in order]


def after_those_who_ran(back: Sequence[T], fresh: Sequence[T], num_back: int) -> list[T]:
    """Return a tenant's whole line: those that ran already first, all but one in four.

    Args:
        num_back: how many that ran already came in since the last one began.
    """
    order: list[T] = []
    ran, new = list(reversed(back)), list(reversed(fresh))
    while ran and new:
        if num_back < FRESH_EVERY - 1:
            order.append(ran.pop())
            num_back += 1
        else:
            order.append(new.pop())
            num_back = 0
    return [*order, *reversed(ran), *reversed(new)]


def in_fair_order(
    shares: FairShares, lines: Mapping[str, Sequence[T]], places: Mapping[str, int]
) -> list[T]:
    """Return all that wait in the order in which ``FairShares.first`` would choose their tenants.

    Args:
        lines: those that wait of each tenant, in order; none is empty.
        places: the number that each tenant holds now; each that is next will hold one more.
    """
    if len(lines) < 2:
        return [x for line in lines.values() for x in line]
    held = {tenant: places.get(tenant, 0) for tenant in lines}
    counts = {x: shares.count(x) for x in {*lines, *places}}
    taken = dict.fromkeys(lines, 0)
    order: list[T] = []
    if not any(places.values()):  # where no tenant holds any the least served is first
        least = min(lines, key=counts.__getitem__)
        order.append(lines[least][0])
        taken[least] = held[least] = 1
    holders = [x for x, number in {**places, **held}.items() if number]
    ahead = max((counts[x] for x in holders), default=0.0)
    # A tenant that is behind a holder goes first, and as a whole: its own places delay no other.
    by_count = sorted(lines, key=counts.__getitem__)
    heap = [(shares.held(x, held[x] + 1), counts[x], i, x) for i, x in enumerate(lines)]
    heapq.heapify(heap)
    num_behind = 0
    while heap:
        while num_behind < len(by_count) and ahead - counts[by_count[num_behind]] >= QUANTUM:
            tenant = by_count[num_behind]
            order += lines[tenant][taken[tenant] :]
            taken[tenant] = len(lines[tenant])
            num_behind += 1
        _, count, i, tenant = heapq.heappop(heap)
        if taken[tenant] == len(lines[tenant]):
            continue
        order.append(lines[tenant][taken[tenant]])
        taken[tenant] += 1
        held[tenant] += 1
        ahead = max(ahead, count)
        heapq.heappush(heap, (shares.held(tenant, held[tenant] + 1), count, i, tenant))
    return order
