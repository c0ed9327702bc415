from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from engines.calibration.measuring.cases import Case, Encode
from engines.calibration.measuring.chains import MOST_PROBLEMS, chain_cases
from engines.calibration.measuring.problems import Problem, problems

TEXTS = [
    "All work and no play makes Jack a dull boy. " * 200,
    "Nobody expects anything here, least of all him. " * 200,
    "All work.",
]


def encode(text: str) -> list[int]:
    return list(text.encode())


def with_begin(text: str) -> list[int]:
    """A tokenizer that begins every text with a token of its own."""
    return [256, *text.encode()]


def pairs(text: str) -> list[int]:
    """A tokenizer that joins answers with the characters beside them."""
    return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]


def words(tokens: tuple[int, ...]) -> str:
    return bytes(tokens).decode()


def cases_of(
    texts: list[str], encode: Encode, context: int, num_cases: int, most_rest: int
) -> Iterator[Case]:
    return chain_cases(map(encode, texts), encode, context, num_cases, most_rest)


def chosen(case: Case, seed: int) -> list[Problem]:
    """The problems of a case, known by their questions."""
    asked = words(case.rest)
    known = islice(problems(seed), MOST_PROBLEMS)
    return [x for x in known if "".join(part.text for part in x.question) in asked]


@pytest.mark.parametrize("context", [512, 2048])
def test_all_facts_are_in_the_prefix_and_all_answers_after_it(context: int) -> None:
    cases = list(cases_of(TEXTS, encode, context, 4, 1000))
    assert len(cases) == 4 and all(x.is_chains and not x.is_text for x in cases)
    for seed, case in enumerate(cases):
        assert len(case.prefix) == context and len(case.rest) <= 1000
        prefix, used = words(case.prefix), chosen(case, seed)
        assert used
        for problem in used:
            places = [prefix.index(f"\n{fact}\n") for fact in problem.facts]
            assert problem.kind == "counting" or places == sorted(places)
        for kind, places in case.answers.items():
            solved = [
                part.text for x in used if x.kind == kind for part in x.question if part.is_answer
            ]
            assert words(tuple(case.rest[i] for i in places)) == "".join(solved)


def test_a_long_prefix_has_problems_of_every_kind() -> None:
    (case,) = cases_of(TEXTS, encode, 8192, 1, 2000)
    assert set(case.answers) == {"arithmetic", "tracing", "table", "counting"}
    assert len(chosen(case, 0)) == MOST_PROBLEMS


def test_every_other_prefix_begins_as_its_text_does() -> None:
    first, second = cases_of(TEXTS, encode, 1024, 2, 1000)
    assert words(first.prefix[:256]) == TEXTS[0][:256]
    assert words(second.prefix[:256]) != TEXTS[1][:256]


def test_the_same_cases_every_time() -> None:
    first, second = (list(cases_of(TEXTS, encode, 600, 3, 500)) for _ in range(2))
    assert first == second and len({x.prefix for x in first}) == 3


def test_the_token_that_begins_a_prompt_is_there_once() -> None:
    for case in cases_of(TEXTS, with_begin, 700, 2, 600):
        assert case.prefix[0] == 256 and 256 not in (*case.prefix[1:], *case.rest)
        assert len(case.prefix) == 700
        digits = [case.rest[i] for places in case.answers.values() for i in places]
        assert bytes(digits).decode().isalnum()


def test_a_tokenizer_that_joins_answers_with_their_neighbours() -> None:
    for case in cases_of(TEXTS, pairs, 600, 2, 600):
        for places in case.answers.values():
            assert places and min(places) > 0 and max(places) < len(case.rest)
            assert list(places) == sorted(places)


@pytest.mark.parametrize(
    ("context", "most_rest", "tokens"),
    [(64, 500, encode), (1024, 8, encode), (1024, 8, with_begin)],
)
def test_where_no_problem_fits_there_is_no_case(
    context: int, most_rest: int, tokens: Encode | Callable[[str], list[int]]
) -> None:
    assert not list(cases_of(TEXTS, tokens, context, 4, most_rest))


def test_nor_where_no_text_is_long_enough() -> None:
    assert not list(cases_of(TEXTS[2:], encode, 512, 4, 500))
