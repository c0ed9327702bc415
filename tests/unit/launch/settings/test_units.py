from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.settings.units import parse_bytes, parse_duration, show_bytes, show_duration, shown


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("4GiB", 4 << 30),
        (" 1.5 GiB ", 3 << 29),
        ("2GB", 2 * 10**9),
        ("512 MiB", 512 << 20),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "4G", "-1", "1e9", "four GiB", "4 GiB more", "0x10", "４GiB"])
def test_text_that_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("250ms", 0.25)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10 minutes", "-3s", "nan", "inf"])
def test_text_that_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(0, 1 << 45))
def test_a_shown_size_can_be_read_back(nbytes):
    again = parse_bytes(show_bytes(nbytes))
    assert abs(again - nbytes) <= 0.05 * nbytes


def test_settings_are_shown_with_their_unit():
    assert shown("engine.hot_bytes", 3 << 29) == "1.5 GiB"
    assert shown("scheduler.idle_after_s", 600.0) == "10 m"
    assert shown("scheduler.idle_after_s", 65) == "65 s"
    assert shown("engine.max_batch", 8) == "8"
    assert shown("gateway.model_aliases", ("a", "b")) == "a, b"
    assert show_duration(0.5) == "0.5 s"
