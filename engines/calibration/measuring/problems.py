"""Problems in words: facts that are stated in one place, and answers that need several of them.

A pass key is found by looking at one passage. Here totals have to be carried on, names to be
followed, one row of many to be found, things to be counted. Everything is drawn from
a seed, so a problem is the same on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

NUM_CHANGES: Final = 4  # of a total
NUM_LOCKERS: Final = 6
NUM_ASKED: Final = 3  # of these lockers
COUNTS: Final = (1, 2, 3, 4)
_NAMES: Final = ("Anna", "Boris", "Chloe", "David", "Elena", "Felix", "Greta", "Henry")
_COLOURS: Final = ("red", "blue", "green", "black", "white", "yellow")
_ROOMS: Final = ("kitchen", "cellar", "office", "attic", "garage", "hall", "pantry", "workshop")
_LETTERS: Final = "BCDFGHKLMNPQRTVXZ"


class Part(NamedTuple):
    """A piece of a question; ``is_answer``: it follows from the facts and from nothing else."""

    text: str
    is_answer: bool = False


@dataclass(frozen=True)
class Problem:
    """Facts in their order, and a question with its right answers filled in."""

    kind: str
    facts: tuple[str, ...]
    question: tuple[Part, ...]


def problems(seed: int) -> Iterator[Problem]:
    """Yield problems without end, one of each kind in turn; no two of them share a name."""
    kinds: Sequence[Callable[[random.Random, int], Problem]] = (
        _running_total,
        _copied_registers,
        _table,
        _count,
    )
    number = 0
    while True:
        for make in kinds:
            yield make(random.Random(f"{make.__name__} {seed} {number}"), number)
        number += 1


def _running_total(rng: random.Random, number: int) -> Problem:
    """Arithmetic in steps: each total needs the one before and a fact."""
    name = _of(_NAMES, number)
    totals: list[int] = []
    while len(set(totals)) <= NUM_CHANGES:  # no answer is said twice
        signs = rng.choices((-1, 1), k=NUM_CHANGES)
        sizes = rng.sample(range(3, 12), NUM_CHANGES)
        changes = [sign * size for sign, size in zip(signs, sizes, strict=True)]
        totals = list(itertools.accumulate(changes, initial=rng.randrange(50, 60)))
    facts = [f"{name} had {totals[0]} coins at first."]
    for change in changes:
        facts.append(f"Then {name} {'found' if change > 0 else 'lost'} {abs(change)} coins.")
    return Problem("arithmetic", tuple(facts), _listed(f"Coins of {name}, one by one: ", totals))


def _copied_registers(rng: random.Random, number: int) -> Problem:
    """A value that was copied on and on, beside one that was not."""
    other, first, second, last = (f"{x}{number}" for x in _pairs(rng, 4))
    value, decoy = rng.sample(range(1000, 10000), 2)
    facts = (
        f"Register {first} holds {value}.",
        f"Register {other} holds {decoy}.",
        f"Register {second} copies {first}.",
        f"Register {last} copies {second}.",
    )
    question = (
        Part(f"Register {last} copies "),
        Part(second, is_answer=True),
        Part(", which copies "),
        Part(first, is_answer=True),
        Part(", which holds "),
        Part(str(value), is_answer=True),
        Part("."),
    )
    return Problem("tracing", facts, question)


def _table(rng: random.Random, number: int) -> Problem:
    """Keys and values; a few of the keys are asked for, in another order."""
    room = _of(_ROOMS, number)
    codes = dict(
        zip(
            rng.sample(range(10, 100), NUM_LOCKERS),
            rng.sample(range(1000, 10000), NUM_LOCKERS),
            strict=True,
        )
    )
    facts = tuple(f"Locker {key} in the {room} opens with {code}." for key, code in codes.items())
    question = [Part(f"Codes in the {room}: ")]
    for key in rng.sample(list(codes), NUM_ASKED):
        question += [Part(f"locker {key}: "), Part(str(codes[key]), is_answer=True), Part("; ")]
    return Problem("table", facts, tuple(question))


def _count(rng: random.Random, number: int) -> Problem:
    """Things of several colours, named one at a time."""
    room = _of(_ROOMS, number)
    counts = dict(zip(rng.sample(_COLOURS, 3), rng.sample(COUNTS, 3), strict=True))
    cups = [colour for colour, count in counts.items() for _ in range(count)]
    rng.shuffle(cups)
    facts = tuple(f"One {colour} cup is in the {room}." for colour in cups)
    question = [Part(f"Cups in the {room}: ")]
    for colour, count in counts.items():
        question += [Part(f"{colour} "), Part(str(count), is_answer=True), Part(", ")]
    return Problem("counting", facts, tuple(question))


def _listed(begin: str, numbers: Sequence[int]) -> tuple[Part, ...]:
    parts = [Part(begin)]
    for number in numbers:
        parts += [Part(str(number), is_answer=True), Part(", ")]
    return tuple(parts)


def _pairs(rng: random.Random, count: int) -> list[str]:
    """Names of two letters, no two alike."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.sample(_LETTERS, 2))] = None
    return list(found)


def _of(names: Sequence[str], number: int) -> str:
    """The name of this number; names that were used up come again with a numeral."""
    again, place = divmod(number, len(names))
    return f"{names[place]} {again + 1}" if again else names[place]
