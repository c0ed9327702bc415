"""Cases of a measurement: texts, needles, and problems whose answers need several facts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from engines.calibration.corpus import Text
from engines.calibration.measuring.cases import (
    MOST_PROBLEMS,
    Case,
    Encode,
    Problem,
    chain_cases,
    needle_cases,
    problems,
    text_cases,
)

LONG = Text("long", "All work and no play makes Jack a dull boy. " * 40)
SHORT = Text("short", "All work.")


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_texts_are_cut_where_the_scoring_begins() -> None:
    (case,) = text_cases([SHORT, LONG], encode, 100, 30)
    assert case.name == "long"
    assert bytes(case.prefix + case.rest).decode() == LONG.content[:130]
    assert len(case.prefix) == 100 and not case.is_needle


def test_a_needle_hides_at_its_depth_and_nowhere_else() -> None:
    cases = list(needle_cases([SHORT, LONG], encode, 600, (0.1, 0.9)))
    for case, depth in zip(cases, (0.1, 0.9), strict=True):
        prefix, rest = bytes(case.prefix).decode(), bytes(case.rest).decode()
        code = rest[-5:]
        assert len(case.prefix) == 600 and case.num_answer == 5
        assert code.isdigit() and prefix.count(code) == 1
        assert abs(prefix.index(code) - depth * 600) < 120

    assert cases == list(needle_cases([SHORT, LONG], encode, 600, (0.1, 0.9)))
    assert len({case.rest for case in cases}) == 2
    for case in needle_cases([LONG], pairs, 300):  # the question is joined with its answer
        assert 0 < case.num_answer <= 3


TEXTS = [
    "All work and no play makes Jack a dull boy. " * 200,
    "Nobody expects anything here, least of all him. " * 200,
    "All work.",
]


def cases_of(
    texts: list[str], encode: Encode, context: int, num_cases: int, most_rest: int
) -> Iterator[Case]:
    return chain_cases(map(encode, texts), encode, context, num_cases, most_rest)


def with_begin(text: str) -> list[int]:
    """A tokenizer that begins every text with a token of its own."""
    return [256, *text.encode()]


def pairs(text: str) -> list[int]:
    """A tokenizer that joins answers with the characters beside them."""
    return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]


def words(tokens: tuple[int, ...]) -> str:
    return bytes(tokens).decode()


def chosen(case: Case, seed: int) -> list[Problem]:
    """The problems of a case, known by their questions."""
    asked = words(case.rest)
    known = islice(problems(seed), MOST_PROBLEMS)
    return [x for x in known if "".join(x.question) in asked]


@pytest.mark.parametrize("context", [512, 2048])
def test_all_facts_are_in_the_prefix_and_all_answers_after_it(context: int) -> None:
    cases = list(cases_of(TEXTS, encode, context, 4, 1000))
    assert len(cases) == len({x.prefix for x in cases}) == 4
    assert all(x.is_chains and not x.is_text for x in cases)
    assert cases == list(cases_of(TEXTS, encode, context, 4, 1000)), "the same every time"
    for seed, case in enumerate(cases):
        assert len(case.prefix) == context and len(case.rest) <= 1000
        prefix, used = words(case.prefix), chosen(case, seed)
        assert used
        for problem in used:
            places = [prefix.index(f"\n{fact}\n") for fact in problem.facts]
            assert problem.kind == "counting" or places == sorted(places)
        for kind, places in case.answers.items():
            solved = "".join("".join(answers(x)) for x in used if x.kind == kind)
            assert words(tuple(case.rest[i] for i in places)) == solved


def test_a_long_prefix_has_problems_of_every_kind() -> None:
    (case,) = cases_of(TEXTS, encode, 8192, 1, 2000)
    assert set(case.answers) == {"arithmetic", "tracing", "table", "counting"}
    assert len(chosen(case, 0)) == MOST_PROBLEMS


def test_every_other_prefix_begins_as_its_text_does() -> None:
    first, second = cases_of(TEXTS, encode, 1024, 2, 1000)
    assert words(first.prefix[:256]) == TEXTS[0][:256]
    assert words(second.prefix[:256]) != TEXTS[1][:256]


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


def test_where_no_problem_fits_there_is_no_case() -> None:
    for context, most_rest, tokens in (64, 500, encode), (1024, 8, encode), (1024, 8, with_begin):
        assert not list(cases_of(TEXTS, tokens, context, 4, most_rest))
    assert not list(cases_of(TEXTS[2:], encode, 512, 4, 500))


SEEDS = range(5)


def of_kind(kind: str) -> Iterator[Problem]:
    for seed in SEEDS:
        yield from (x for x in islice(problems(seed), 24) if x.kind == kind)


def answers(problem: Problem) -> list[str]:
    return [*problem.question[1::2]]


def totals(problem: Problem) -> list[str]:
    changes = [int(re.findall(r"\d+ coins", x)[0].split()[0]) for x in problem.facts]
    signs = [-1 if " lost " in x else 1 for x in problem.facts]
    steps = [a * b for a, b in zip(changes, signs, strict=True)]
    return [str(sum(steps[: i + 1])) for i in range(len(steps))]


def traced(problem: Problem) -> list[str]:
    said = dict(x.rstrip(".").removeprefix("Register ").split(" ", 1) for x in problem.facts)
    found = [problem.question[0].split()[1]]
    while said.get(found[-1]):
        found.append(said[found[-1]].split()[1])
    return found[1:]


def looked_up(problem: Problem) -> list[str]:
    codes = {x.split()[1]: x.split()[-1].rstrip(".") for x in problem.facts}
    return [codes[x] for x in re.findall(r"locker (\d+)", words_of(problem))]


def counted(problem: Problem) -> list[str]:
    colours = Counter(x.split()[1] for x in problem.facts)
    asked = re.findall("|".join(colours), words_of(problem))
    return [str(colours[x]) for x in asked]


def words_of(problem: Problem) -> str:
    return "".join(problem.question[::2])


SOLVED = {"arithmetic": totals, "tracing": traced, "table": looked_up, "counting": counted}


@pytest.mark.parametrize(("kind", "solved"), SOLVED.items())
def test_answers_follow_from_the_facts(kind: str, solved: Callable[[Problem], list[str]]) -> None:
    found = list(of_kind(kind))
    assert len(found) == 6 * len(SEEDS)
    for problem in found:
        assert answers(problem) == solved(problem) and len(answers(problem)) >= 3


def test_no_question_gives_its_answers_away() -> None:
    for seed in SEEDS:
        for problem in islice(problems(seed), 24):
            asked = re.findall(r"\w+", words_of(problem))
            assert not set(asked) & set(answers(problem)), problem
            assert len(set(answers(problem))) == len(answers(problem)), problem


def test_the_same_problems_every_time_and_others_by_another_seed() -> None:
    first, second, other = (list(islice(problems(x), 16)) for x in (3, 3, 4))
    assert first == second
    assert not {x.facts for x in first} & {x.facts for x in other}


def test_problems_of_one_prefix_are_not_mixed_up() -> None:
    found = list(islice(problems(0), 64))
    for kind in ("arithmetic", "table", "counting"):
        names = [x.question[0] for x in found if x.kind == kind]
        assert len(set(names)) == len(names) == 16
    facts = [fact for x in found for fact in x.facts if x.kind != "counting"]
    assert len(set(facts)) == len(facts)
