from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.mlx_worker.answer.output_processor import StopStrings


def read(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    reader = StopStrings(stops)
    text = "".join(reader.feed(piece) for piece in pieces)
    return text + reader.flush(), reader.hit


def test_beginning_of_a_stop_string_is_held_back_until_decided() -> None:
    reader = StopStrings(["\n\nUser:"])
    assert reader.feed("hello\n") == "hello"
    assert reader.feed("\nUse") == ""
    assert reader.feed("less") == "\n\nUseless"
    assert not reader.hit


def test_nothing_after_a_hit() -> None:
    reader = StopStrings(["x"])
    assert reader.feed("ax") == "a"
    assert reader.feed("more") == ""
    assert reader.flush() == ""
    assert reader.num_passed == 1


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_same_as_searching_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    # The reader sees the end of a stop string first.
    ends = [(whole.find(x) + len(x), whole.find(x)) for x in stops if x in whole]
    text, hit = read(stops, list(whole))
    assert hit == bool(ends)
    assert text == (whole[: min(at for end, at in ends if end == min(ends)[0])] if ends else whole)
