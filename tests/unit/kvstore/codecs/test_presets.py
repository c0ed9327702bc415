from __future__ import annotations

import pytest

from kvstore.codecs.calibrated import calibrated_preset
from kvstore.codecs.names import CODECS, LEARNABLE, READY
from kvstore.codecs.presets import check_name, codec_by_name, is_exact, warm
from kvstore.codecs.raw import RawCodec
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout
from tests.unit.kvstore.codecs.samples import layout_of


def test_every_name_gives_the_codec_of_that_name():
    for name in [name for name, entry in CODECS.items() if entry.make]:
        assert codec_by_name(name).id.split(".")[0] == name


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownCodec, match="'tq9'; there are raw, lm3, tq3, tq4"):
        codec_by_name("tq9")


def test_names_are_checked_without_a_profile():
    with pytest.raises(UnknownCodec, match="no codec named 'zip'.* balanced, .*max") as refused:
        check_name("zip")
    assert str(refused.value).count("dense3") == 1
    for name in ("max", "spectral", "tq3", "kvstore.codecs.raw:RawCodec"):
        check_name(name)


def test_only_raw_is_exact():
    names = [*CODECS, "kvstore.codecs.raw:RawCodec"]
    assert [x for x in names if is_exact(x)] == ["raw", "kvstore.codecs.raw:RawCodec"]
    for name in READY:
        assert codec_by_name(name).exact == is_exact(name)


def test_bits_are_those_of_the_codecs():
    layout = layout_of(128)
    for name, entry in CODECS.items():
        if entry.make and not entry.learn:
            nbytes = codec_by_name(name).packed_nbytes(layout, 128, 128)
            assert 8 * nbytes / 128 / layout.elements_per_token == pytest.approx(entry.bits, 0.002)


def test_what_learns_can_be_imported():
    for name in LEARNABLE:
        assert callable(calibrated_preset(name).learn)


def test_an_import_string_is_a_codec_or_makes_one():
    assert isinstance(codec_by_name("kvstore.codecs.raw:RawCodec"), RawCodec)
    assert codec_by_name(f"{__name__}:OWN") is OWN


@pytest.mark.parametrize("name", ["nowhere:Codec", "kvstore.codecs.raw:Nothing", ":", "a:", "..:x"])
def test_an_import_string_that_leads_nowhere(name):
    with pytest.raises(UnknownCodec):
        codec_by_name(name)


@pytest.mark.parametrize("name", READY)
def test_warming_takes_any_layout(name):
    warm(codec_by_name(name), layout_of(64))
    warm(codec_by_name(name), KVLayout("float32", ()))


OWN = RawCodec("own.1")
