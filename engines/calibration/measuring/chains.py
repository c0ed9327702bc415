"""Cases of *reasoning chains*: problems whose facts lie among a text that goes through the codec.

The facts are in the prefix, the questions after it, with the right answers filled in. Judged is
whether the model expects at the answers what it expects after its exact cache. Whether that is
right is another matter: of small models it seldom is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from engines.calibration.measuring.cases import Case, Encode
from engines.calibration.measuring.prefixes import common_length
from engines.calibration.measuring.problems import Part, Problem, problems

MOST_PROBLEMS: Final = 12  # of one case
FACTS_SHARE: Final = 2  # at most one in so many tokens of a prefix is a fact's
# Shares of the text before the first fact, in turn: after a half of it a prefix begins as that of
# the text's own case does, and is prefilled from there.
BEGINS: Final = (0.5, 0.05)


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
        for part in (*problem.question, Part("\n")):
            if part.is_answer:
                spans.append((problem.kind, text, text + part.text))
            text += part.text
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
