"""The cases of a measurement: a prefix, whose KV is packed and unpacked, and tokens after it.

In a *text* case the text goes on; a *needle* case ends in a question whose answer stands in the
prefix and nowhere else. In a case of *reasoning chains* the prefix has the facts of problems among
a text, and the questions stand after it, with the right answers filled in. Judged is whether the
model expects at the answers what it expects after its exact cache. Whether that is right is another
matter: of small models it seldom is.

A needle is found by looking at one passage. In problems totals have to be carried on, names to be
followed, one row of many to be found, things to be counted. Everything is drawn from a seed, so a
problem is the same on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engines.calibration.corpus import Text
from engines.config import DEPTHS

NUM_CHANGES: Final = 4  # of a total
NUM_LOCKERS: Final = 6
NUM_ASKED: Final = 3  # of these lockers
COUNTS: Final = (1, 2, 3, 4)
_NAMES: Final = ("Anna", "Boris", "Chloe", "David", "Elena", "Felix", "Greta", "Henry")
_COLOURS: Final = ("red", "blue", "green", "black", "white", "yellow")
_ROOMS: Final = ("kitchen", "cellar", "office", "attic", "garage", "hall", "pantry", "workshop")
_LETTERS: Final = "BCDFGHKLMNPQRTVXZ"
Encode = Callable[[str], list[int]]
_PLACES = ("vault", "archive", "garage", "library", "tower", "harbour", "cellar", "station")
MOST_PROBLEMS: Final = 12  # of one case
FACTS_SHARE: Final = 2  # at most one in so many tokens of a prefix is a fact's
# Shares of the text before the first fact, in turn.
BEGINS: Final = (0.5, 0.05)


@dataclass(frozen=True)
class Problem:
    """Facts in their order, and a question with its right answers filled in.

    Every second part of the question is an answer: it follows from the facts and from nothing else.
    """

    kind: str
    facts: tuple[str, ...]
    question: tuple[str, ...]


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
    asked = _asked(f"Coins of {name}, one by one: ", [("", x) for x in totals], ", ")
    return Problem("arithmetic", tuple(facts), asked)


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
    begin, then = f"Register {last} copies ", (", which copies ", first, ", which holds ")
    return Problem("tracing", facts, (begin, second, *then, str(value), "."))


def _table(rng: random.Random, number: int) -> Problem:
    """Keys and values; a few of the keys are asked for, in another order."""
    room = _of(_ROOMS, number)
    keys = rng.sample(range(10, 100), NUM_LOCKERS)
    codes = dict(zip(keys, rng.sample(range(1000, 10000), NUM_LOCKERS), strict=True))
    facts = tuple(f"Locker {key} in the {room} opens with {code}." for key, code in codes.items())
    asked = [(f"locker {key}: ", codes[key]) for key in rng.sample(list(codes), NUM_ASKED)]
    return Problem("table", facts, _asked(f"Codes in the {room}: ", asked, "; "))


def _count(rng: random.Random, number: int) -> Problem:
    """Things of several colours, named one at a time."""
    room = _of(_ROOMS, number)
    counts = dict(zip(rng.sample(_COLOURS, 3), rng.sample(COUNTS, 3), strict=True))
    cups = [colour for colour, count in counts.items() for _ in range(count)]
    rng.shuffle(cups)
    facts = tuple(f"One {colour} cup is in the {room}." for colour in cups)
    asked = [(f"{colour} ", count) for colour, count in counts.items()]
    return Problem("counting", facts, _asked(f"Cups in the {room}: ", asked, ", "))


def _asked(begin: str, answers: Iterable[tuple[str, object]], end: str) -> tuple[str, ...]:
    """A question of several answers, each between some words and ``end``."""
    parts = [begin]
    for words, answer in answers:
        parts[-1] += words
        parts += [str(answer), end]
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


@dataclass(frozen=True)
class Case:
    """A prefix and the tokens after it, whose log-probabilities are compared."""

    name: str
    prefix: tuple[int, ...]
    rest: tuple[int, ...]
    num_answer: int = 0  # for a needle: so many tokens at the end of ``rest`` are the answer
    # For chains: by kind of problem the places in ``rest`` of the tokens that are answers.
    answers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_needle(self) -> bool:
        return self.num_answer > 0

    @property
    def is_text(self) -> bool:
        return not (self.is_needle or self.is_chains)

    @property
    def is_chains(self) -> bool:
        return bool(self.answers)


def text_cases(
    texts: Sequence[Text], encode: Encode, context: int, num_scored: int
) -> Iterator[Case]:
    """A case for each text that has ``context + num_scored`` tokens."""
    for text in texts:
        tokens = encode(text.content)
        if len(tokens) >= context + num_scored:
            end = context + num_scored
            yield Case(text.name, tuple(tokens[:context]), tuple(tokens[context:end]))


def needle_cases(
    texts: Sequence[Text], encode: Encode, context: int, depths: Sequence[float] = DEPTHS
) -> Iterator[Case]:
    """Cases with a pass key at each depth, using the texts that are long enough in turn.

    The same texts and depths give the same cases.
    """
    rng = random.Random(1)
    hays = [tokens for text in texts if len(tokens := encode(text.content)) >= context]
    for i, depth in enumerate(depths if hays else ()):
        place, code = _PLACES[i % len(_PLACES)], str(rng.randrange(10_000, 99_999))
        fact = encode(f"\n\nImportant: the secret passkey of the {place} is {code}.\n\n")
        hay = hays[i % len(hays)][: context - len(fact)]
        at = int(len(hay) * depth)
        question = f"\n\nRemember: the secret passkey of the {place} is "
        # A tokenizer may join the question's last blank with the first digit.
        asked, rest = encode(question), encode(question + code)
        yield Case(
            f"needle at {depth:.0%}",
            (*hay[:at], *fact, *hay[at:]),
            tuple(rest),
            len(rest) - common_length(asked, rest),
        )


def chain_cases(
    texts: Iterable[Sequence[int]],
    encode: Encode,
    context: int,
    num_cases: int,
    most_rest: int,
) -> Iterator[Case]:
    """Yield cases of ``context`` tokens, each with the problems that fit.

    The same texts give the same cases. There are none where not even one problem fits.

    Args:
        texts: their tokens; those of fewer than ``context`` are left out.
        most_rest: tokens that questions and answers of one case may take.
    """
    hays = [tokens for tokens in texts if len(tokens) >= context]
    for number in range(num_cases if hays else 0):
        chosen = _fitting(problems(number), encode, context // FACTS_SHARE, most_rest)
        if not chosen:
            return
        facts = [_inner(encode, f"\n{fact}\n") for fact in _interleaved(chosen)]
        rest, answers = _questions(chosen, encode)
        begin = BEGINS[number % len(BEGINS)]
        prefix = _hidden(facts, hays[number % len(hays)], context, begin)
        yield Case(f"chains {number + 1}", prefix, rest, answers=answers)


def _fitting(
    source: Iterator[Problem], encode: Encode, most_facts: int, most_rest: int
) -> list[Problem]:
    """The first problems that together fit; one that is too long is left out."""
    chosen: list[Problem] = []
    for problem in itertools.islice(source, MOST_PROBLEMS):
        facts = sum(len(_inner(encode, f"\n{x}\n")) for x in _interleaved([*chosen, problem]))
        if facts <= most_facts and len(_questions([*chosen, problem], encode)[0]) <= most_rest:
            chosen.append(problem)
    return chosen


def _interleaved(chosen: Iterable[Problem]) -> Iterator[str]:
    """The facts of all problems by turns, those of each in their order."""
    for row in itertools.zip_longest(*(problem.facts for problem in chosen)):
        yield from (fact for fact in row if fact is not None)


def _hidden(
    facts: Sequence[Sequence[int]], hay: Sequence[int], context: int, begin: float
) -> tuple[int, ...]:
    """``context`` tokens: a share of the text, then the facts with the rest of it between them."""
    filler = hay[: context - sum(map(len, facts))]
    head = int(len(filler) * begin)
    cuts = [head + (len(filler) - head) * i // len(facts) for i in range(len(facts) + 1)]
    parts = [filler[:head]]
    for fact, (first, last) in zip(facts, itertools.pairwise(cuts), strict=True):
        parts += [fact, filler[first:last]]
    return tuple(itertools.chain.from_iterable(parts))


def _questions(
    chosen: Iterable[Problem], encode: Encode
) -> tuple[tuple[int, ...], Mapping[str, tuple[int, ...]]]:
    """The tokens of all questions, and by kind the places of those that are answers."""
    text, spans = "\n\n", []
    for problem in chosen:
        for number, part in enumerate(problem.question):
            if number % 2:
                spans.append((problem.kind, text, text + part))
            text += part
        text += "\n"
    tokens = encode(text)
    begin = len(encode(""))
    answers: dict[str, tuple[int, ...]] = {}
    for kind, before, after in spans:
        # A tokenizer may join an answer with the text beside it.
        first = common_length(encode(before), tokens)
        last = max(common_length(encode(after), tokens), first + 1)
        answers[kind] = (*answers.get(kind, ()), *range(first - begin, last - begin))
    return tuple(tokens[begin:]), answers


def _inner(encode: Encode, text: str) -> list[int]:
    """The tokens of a text that does not begin a prompt."""
    return encode(text)[len(encode("")) :]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
