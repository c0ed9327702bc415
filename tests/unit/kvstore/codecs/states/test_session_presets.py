"""Names of presets of whole sessions: what they are made of, and which are measured."""

from __future__ import annotations

import pytest

from kvstore.codecs.catalogue import STATES
from kvstore.codecs.names import PresetParts, for_session, parts_of, session_presets
from kvstore.codecs.presets import check_name, is_exact
from kvstore.codecs.session_codec import open_session_codec
from kvstore.errors import UnknownCodec
from kvstore.shapes import StateLayout
from tests.unit.kvstore.codecs.samples import layout_of

PARTS = {
    "dense3": (),
    "dense3+window4": ("window4",),
    "dense3+state8": ("", "state8"),
    "dense3+window4+state8": ("window4", "state8"),
    "dense3+state8+window4": ("", "state8+window4"),
    "dense3+nothing": ("", "nothing"),
}


@pytest.mark.parametrize(("name", "others"), PARTS.items())
def test_a_name_has_parts(name: str, others: tuple[str, ...]) -> None:
    parts = PresetParts("dense3", *others)
    assert parts_of(name) == parts
    assert parts.name == name
    known = parts.states in ("", *STATES)
    if known:
        check_name(name)
    else:
        with pytest.raises(UnknownCodec, match="there are window4, state16"):
            check_name(name)


@pytest.mark.parametrize("name", ["dense3+", "raw+", "dense3+window4+", "dense3++state8"])
def test_an_empty_part_is_refused(name: str) -> None:
    with pytest.raises(UnknownCodec, match="after its"):
        check_name(name)


def test_only_a_preset_without_ways_can_be_exact() -> None:
    assert is_exact("raw")
    assert not any(map(is_exact, ("raw+window4", "raw+state8", "dense3")))


@pytest.mark.parametrize(
    ("windows", "matrices", "full"),
    [
        (False, False, "dense3"),
        (True, False, "dense3+window4"),
        (False, True, "dense3+state8"),
        (True, True, "dense3+window4+state8"),
    ],
)
def test_a_model_has_the_methods_for_the_parts_that_it_keeps(
    windows: bool, matrices: bool, full: str
) -> None:
    assert for_session("dense3+window4", windows, matrices) == full
    assert for_session("raw", windows, matrices) == "raw"


def test_each_preset_is_measured_with_finer_windows_too() -> None:
    names = ("dense3", "balanced", "raw", "tq4", "safe", "fp8")  # only two are coarser
    found = session_presets(names, has_rows=True, has_windows=True, has_matrices=False)
    assert found == (*names, "dense3+window4", "balanced+window4")
    # Where windows are all there is, the preset is theirs.
    assert session_presets(names, False, True, False) == names
    assert session_presets(names, True, False, False) == names
    plain = [x for x, entry in STATES.items() if not entry.learns]
    assert session_presets(names, False, False, True)[1:] == tuple(f"raw+{x}" for x in plain)


def test_rows_of_windows_go_through_the_codec_that_is_named() -> None:
    states = StateLayout(layout_of(64), 128)
    own = open_session_codec("tq3", None, states)
    finer = open_session_codec("tq3+window4", None, states)
    assert own.windows.id == own.kv.id
    assert finer.windows.id.startswith("tq4")
    assert finer.kv.id == own.kv.id and finer.id != own.id


def test_where_bits_can_be_dealt_four_are_not_spread_evenly() -> None:
    ways = ("state16", "state8", "state6", "dealt6", "dealt5", "dealt4")
    assert session_presets((), False, False, True, True)[1:] == tuple(f"raw+{x}" for x in ways)
    found = session_presets(("dense3", "tq4"), True, False, True, True)
    assert set(found) == {"tq4+state8", *(f"dense3+{x}" for x in ways)}
