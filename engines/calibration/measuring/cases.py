"""The cases of a measurement: a prefix, whose KV is packed and unpacked, and tokens after it.

In a *text* case the tokens after the prefix continue its text. A *needle* case ends in a question
whose answer is in the prefix and nowhere else. In a case of *reasoning chains*, the prefix is a
text with the facts of problems in it; the questions come after it, with the right answers filled
in. At the answers, the model's predictions are compared with those after its exact cache. Whether
they are right does not count: small models are seldom right.

One passage is enough to find a needle. Problems need more: totals are to be carried on, names
followed, one of many rows found, things counted. Everything is drawn from a seed, so a problem is
the same on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engines.calibration.corpus import Text
from engines.config import DEPTHS

NUM_CHANGES: Final = 4  # changes of a running total
NUM_LOCKERS: Final = 6
NUM_ASKED: Final = 3  # lockers that the question asks for
COUNTS: Final = (1, 2, 3, 4)
_NAMES: Final = ("Anna", "Boris", "Chloe", "David", "Elena", "Felix", "Greta", "Henry")
_COLOURS: Final = ("red", "blue", "green", "black", "white", "yellow")
_ROOMS: Final = ("kitchen", "cellar", "office", "attic", "garage", "hall", "pantry", "workshop")
_LETTERS: Final = "BCDFGHKLMNPQRTVXZ"
Encode = Callable[[str], list[int]]
_PLACES = ("vault", "archive", "garage", "library", "tower", "harbour", "cellar", "station")
MOST_PROBLEMS: Final = 12  # in one case
FACTS_SHARE: Final = 2  # facts take at most 1 / FACTS_SHARE of a prefix
# The part of the text that comes before the first fact, by case in turn.
BEGINS: Final = (0.5, 0.05)


@dataclass(frozen=True)
class Problem:
    """Facts in order, and a question with the right answers filled in.

    Every second part of ``question`` is an answer, which only the facts determine.
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
    """Return an arithmetic problem: each total follows from the one before it and a fact."""
    name = _of(_NAMES, number)
    totals: list[int] = []
    while len(set(totals)) <= NUM_CHANGES:  # all answers differ
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
    """Return a problem of tracing a value that was copied twice, beside another value."""
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
    """Return a problem of finding the values of a few keys, asked in another order."""
    room = _of(_ROOMS, number)
    keys = rng.sample(range(10, 100), NUM_LOCKERS)
    codes = dict(zip(keys, rng.sample(range(1000, 10000), NUM_LOCKERS), strict=True))
    facts = tuple(f"Locker {key} in the {room} opens with {code}." for key, code in codes.items())
    asked = [(f"locker {key}: ", codes[key]) for key in rng.sample(list(codes), NUM_ASKED)]
    return Problem("table", facts, _asked(f"Codes in the {room}: ", asked, "; "))


def _count(rng: random.Random, number: int) -> Problem:
    """Return a problem of counting things of several colours."""
    room = _of(_ROOMS, number)
    counts = dict(zip(rng.sample(_COLOURS, 3), rng.sample(COUNTS, 3), strict=True))
    cups = [colour for colour, count in counts.items() for _ in range(count)]
    rng.shuffle(cups)
    facts = tuple(f"One {colour} cup is in the {room}." for colour in cups)
    asked = [(f"{colour} ", count) for colour, count in counts.items()]
    return Problem("counting", facts, _asked(f"Cups in the {room}: ", asked, ", "))


def _asked(begin: str, answers: Iterable[tuple[str, object]], end: str) -> tuple[str, ...]:
    """Return the parts of a question: for each answer some words, the answer and ``end``."""
    parts = [begin]
    for words, answer in answers:
        parts[-1] += words
        parts += [str(answer), end]
    return tuple(parts)


def _pairs(rng: random.Random, count: int) -> list[str]:
    """Return ``count`` different names of two letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.sample(_LETTERS, 2))] = None
    return list(found)


def _of(names: Sequence[str], number: int) -> str:
    """Return the name of this number; beyond ``names``, they are repeated with a numeral."""
    again, place = divmod(number, len(names))
    return f"{names[place]} {again + 1}" if again else names[place]


@dataclass(frozen=True)
class Case:
    """A prefix and the tokens after it, whose log-probabilities are compared."""

    name: str
    prefix: tuple[int, ...]
    rest: tuple[int, ...]
    num_answer: int = 0  # for a needle: the number of answer tokens, at the end of ``rest``
    # For chains: the indices in ``rest`` of the tokens of answers, by kind of problem.
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
    """Yield a case for each text that has ``context + num_scored`` tokens."""
    for text in texts:
        tokens = encode(text.content)
        if len(tokens) >= context + num_scored:
            end = context + num_scored
            yield Case(text.name, tuple(tokens[:context]), tuple(tokens[context:end]))


def needle_cases(
    texts: Sequence[Text], encode: Encode, context: int, depths: Sequence[float] = DEPTHS
) -> Iterator[Case]:
    """Yield a case with a pass key for each depth, in turn in each text that is long enough.

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
    """Yield cases with a prefix of ``context`` tokens, each with the problems that fit.

    The same texts give the same cases. There is none if not even one problem fits.

    Args:
        texts: their tokens; those of fewer than ``context`` are left out.
        most_rest: the most tokens of the questions and answers of a case.
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
    """Return the first problems that fit together; one that is too long is left out."""
    chosen: list[Problem] = []
    for problem in itertools.islice(source, MOST_PROBLEMS):
        facts = sum(len(_inner(encode, f"\n{x}\n")) for x in _interleaved([*chosen, problem]))
        if facts <= most_facts and len(_questions([*chosen, problem], encode)[0]) <= most_rest:
            chosen.append(problem)
    return chosen


def _interleaved(chosen: Iterable[Problem]) -> Iterator[str]:
    """Yield the facts of all problems in turn, those of each in their order."""
    for row in itertools.zip_longest(*(problem.facts for problem in chosen)):
        yield from (fact for fact in row if fact is not None)


def _hidden(
    facts: Sequence[Sequence[int]], hay: Sequence[int], context: int, begin: float
) -> tuple[int, ...]:
    """Return ``context`` tokens: the part ``begin`` of the text, then facts amid the rest."""
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
    """Return the tokens of all questions, and the indices of the answers' tokens by kind."""
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
    """Return the tokens of a text inside a prompt, without the first token (BOS)."""
    return encode(text)[len(encode("")) :]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of both."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
