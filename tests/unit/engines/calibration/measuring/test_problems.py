"""Problems: the same every time, rightly solved, and not to be solved without their facts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from engines.calibration.measuring.problems import Problem, problems

SEEDS = range(5)


def of_kind(kind: str) -> Iterator[Problem]:
    for seed in SEEDS:
        yield from (x for x in islice(problems(seed), 24) if x.kind == kind)


def answers(problem: Problem) -> list[str]:
    return [part.text for part in problem.question if part.is_answer]


def totals(problem: Problem) -> list[str]:
    changes = [int(re.findall(r"\d+ coins", x)[0].split()[0]) for x in problem.facts]
    signs = [-1 if " lost " in x else 1 for x in problem.facts]
    steps = [a * b for a, b in zip(changes, signs, strict=True)]
    return [str(sum(steps[: i + 1])) for i in range(len(steps))]


def traced(problem: Problem) -> list[str]:
    said = dict(x.rstrip(".").removeprefix("Register ").split(" ", 1) for x in problem.facts)
    found = [problem.question[0].text.split()[1]]
    while said.get(found[-1]):
        found.append(said[found[-1]].split()[1])
    return found[1:]


def looked_up(problem: Problem) -> list[str]:
    codes = {x.split()[1]: x.split()[-1].rstrip(".") for x in problem.facts}
    return [codes[x] for x in re.findall(r"locker (\d+)", words(problem))]


def counted(problem: Problem) -> list[str]:
    colours = Counter(x.split()[1] for x in problem.facts)
    asked = re.findall("|".join(colours), words(problem))
    return [str(colours[x]) for x in asked]


def words(problem: Problem) -> str:
    return "".join(part.text for part in problem.question if not part.is_answer)


@pytest.mark.parametrize(
    ("kind", "solved"),
    [
        ("arithmetic", totals),
        ("tracing", traced),
        ("table", looked_up),
        ("counting", counted),
    ],
)
def test_answers_follow_from_the_facts(kind: str, solved: Callable[[Problem], list[str]]) -> None:
    found = list(of_kind(kind))
    assert len(found) == 6 * len(SEEDS)
    for problem in found:
        assert answers(problem) == solved(problem) and len(answers(problem)) >= 3


def test_no_question_gives_its_answers_away() -> None:
    for seed in SEEDS:
        for problem in islice(problems(seed), 24):
            asked = re.findall(r"\w+", words(problem))
            assert not set(asked) & set(answers(problem)), problem
            assert len(set(answers(problem))) == len(answers(problem)), problem


def test_the_same_problems_every_time_and_others_by_another_seed() -> None:
    first, second, other = (list(islice(problems(x), 16)) for x in (3, 3, 4))
    assert first == second
    assert not {x.facts for x in first} & {x.facts for x in other}


def test_problems_of_one_prefix_are_not_mixed_up() -> None:
    found = list(islice(problems(0), 64))
    for kind in ("arithmetic", "table", "counting"):
        names = [x.question[0].text for x in found if x.kind == kind]
        assert len(set(names)) == len(names) == 16
    facts = [fact for x in found for fact in x.facts if x.kind != "counting"]
    assert len(set(facts)) == len(facts)
