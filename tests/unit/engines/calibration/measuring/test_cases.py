from __future__ import annotations

from engines.calibration.corpus import Text
from engines.calibration.measuring.cases import needle_cases, text_cases

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


def test_the_same_needles_every_time() -> None:
    first, second = (list(needle_cases([LONG], encode, 600)) for _ in range(2))
    assert first == second
    assert len({case.rest for case in first}) == len(first)


def test_a_tokenizer_that_joins_the_question_with_its_answer() -> None:
    def pairs(text: str) -> list[int]:
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    for case in needle_cases([LONG], pairs, 300):
        assert 0 < case.num_answer <= 3
