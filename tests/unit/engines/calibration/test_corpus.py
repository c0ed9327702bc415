from __future__ import annotations

from engines.calibration.corpus import fit_texts, held_out_texts

PASSAGE = 8  # words
MOST_SHARED = 0.002  # of a text's passages: "Traceback (most recent call last)" and the like


def passages(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + PASSAGE]) for i in range(len(words) - PASSAGE + 1)}


def test_no_passage_is_on_both_sides() -> None:
    learned = set().union(*(passages(x.content) for x in fit_texts()))
    assert learned and held_out_texts()
    for text in held_out_texts():
        own = passages(text.content)
        assert len(own & learned) <= MOST_SHARED * len(own), text.name


def test_no_held_out_text_says_the_same_twice() -> None:
    """Filler would be predicted from the copy, even if the rest of the past were lost."""
    written = [x for x in held_out_texts() if " " not in x.name and "-" in x.name]
    assert len(written) == 3
    for text in written:
        assert len(passages(text.content)) > 0.98 * len(text.content.split()), text.name
