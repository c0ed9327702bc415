from __future__ import annotations

import pytest

from kvstore.blobs.format import codec_field
from kvstore.codecs.base import RawCodec
from kvstore.codecs.calibrated import calibrated_preset
from kvstore.codecs.names import (
    CODECS,
    LEARNABLE,
    READY,
    canonical,
    parameters_of,
    split_names,
    with_parameters,
)
from kvstore.codecs.presets import check_name, codec_by_name, is_exact, warm
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout
from tests.unit.kvstore.codecs.samples import layout_of


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        UnknownCodec, match=r"'tq9' \(did you mean tq\d*\?\); there are raw, lm3, tq3, tq4"
    ):
        codec_by_name("tq9")


def test_names_are_checked_without_a_profile():
    with pytest.raises(UnknownCodec, match="no codec named 'zip'.* balanced, .*max") as refused:
        check_name("zip")
    assert str(refused.value).count("dense3") == 1
    for name in ("max", "spectral", "tq3", "kvstore.codecs.base:RawCodec"):
        check_name(name)


def test_a_learned_codec_without_a_profile_is_distinguished_from_an_unknown_one():
    with pytest.raises(UnknownCodec, match="'balanced' needs a profile"):
        codec_by_name("balanced")
    with pytest.raises(UnknownCodec, match=r"calibrate --presets ratequant:bits=3$"):
        codec_by_name("ratequant:bits=3.0")


ONE_WAY = [
    *(("tq:bits=4", "tq4"), ("tq:bits=3+window4+state8", "tq3+window4+state8"), ("tq", "tq3")),
    *(("kivi:bits=2", "kivi"), ("kivi:group=64,bits=4", "kivi:bits=4,group=64")),
    *(("kivi:bits=4.0", "kivi:bits=4"), ("commvq:stages=1,dim=32", "commvq:dim=32,stages=1")),
    *((x, x) for x in ("ratequant:bits=2.25", "kvstore.codecs.base:RawCodec", "dense3+state8")),
]


@pytest.mark.parametrize(("name", "one_way"), ONE_WAY)
def test_parameters_are_written_in_one_way(name, one_way):
    assert canonical(name) == canonical(one_way) == one_way
    check_name(name)


REFUSED = {
    "tqprod:bits=9": r"bits=9 of codec 'tqprod': a whole number from 2 to 4",
    **dict.fromkeys(("kivi:bits=2.5", "kivi:bits=nan", "tq:bits=9"), "a whole number from 1 to 8"),
    "ratequant:bits=x": "a number from 1 to 8",
    "kivi:bit=2": r"no parameter 'bit'; there are bits \(1 to 8, usually 2\), group",
    "kivi:bits=2,bits=4": "sets 'bits' twice",
    "raw:bits=2": "'raw' has no parameter 'bits'; there are none",
    "zip:bits=2": "no codec named 'zip'",
    "tqprod4": r"'tqprod4' \(did you mean tqprod\?\); there are raw",
}


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_wrong_parameters_are_refused_with_the_right_ones(name, why):
    for refuse in (check_name, codec_by_name):
        with pytest.raises(UnknownCodec, match=why):
            refuse(name)


def test_ids_of_parameters_differ_and_fit_a_blob():
    names = [
        *("kivi", "kivi:bits=4", "kivi:bits=4,group=64", "tqprod:bits=2", "tqprod", "qjl:signs=99"),
        *("rvq", "rvq:bits=2", "rvq:bits=3"),
        *("vecinfer:bits=1", "playground:key_bits=4,value_bits=4,group=64", "playground"),
    ]
    ids = [codec_by_name(name).id for name in names]
    assert len({*ids}) == len(ids)
    for name, codec_id in zip(names, ids, strict=True):
        assert codec_id.startswith(name.partition(":")[0]) and len(codec_field(codec_id)) <= 24
    assert codec_by_name("tq:bits=4") == codec_by_name("tq4")
    assert codec_by_name("kivi:bits=4") == codec_by_name("kivi:bits=4.0")


def test_lists_of_names_may_have_parameters():
    text = "ours, kivi:bits=4,group=64,tq:bits=2 ,max"
    assert split_names(text) == ["ours", "kivi:bits=4,group=64", "tq:bits=2", "max"]


def test_parameters_of_a_learned_preset_reach_it():
    preset = calibrated_preset("ratequant:bits=3,least=1")
    assert (preset.bits, preset.least) == (3, 1)
    assert parameters_of("commvq:dim=32") == {"dim": 32, "stages": 2}
    assert with_parameters("kivi:bits=4", {"group": 64}) == "kivi:bits=4,group=64"


def test_only_raw_is_exact():
    names = [*CODECS, "kvstore.codecs.base:RawCodec"]
    assert [x for x in names if is_exact(x)] == ["raw", "kvstore.codecs.base:RawCodec"]
    for name in READY:
        assert codec_by_name(name).exact == is_exact(name)


def test_bits_are_those_of_the_codecs():
    layout = layout_of(128)
    for name, entry in CODECS.items():
        if entry.make and not entry.learn:
            nbytes = codec_by_name(name).packed_nbytes(layout, 128, 128)
            assert 8 * nbytes / 128 / layout.elements_per_token == pytest.approx(entry.bits, 0.002)


def test_presets_that_learn_can_be_imported():
    for name in LEARNABLE:
        assert callable(calibrated_preset(name).learn)


def test_an_import_string_is_a_codec_or_makes_one():
    assert isinstance(codec_by_name("kvstore.codecs.base:RawCodec"), RawCodec)
    assert codec_by_name(f"{__name__}:OWN") is OWN


@pytest.mark.parametrize(
    "name", ["nowhere:Codec", "kvstore.codecs.base:Nothing", ":", "a:", "..:x"]
)
def test_an_import_string_that_leads_nowhere(name):
    with pytest.raises(UnknownCodec):
        codec_by_name(name)


@pytest.mark.parametrize("name", READY)
def test_warming_takes_any_layout(name):
    warm(codec_by_name(name), layout_of(64))
    warm(codec_by_name(name), KVLayout("float32", ()))


OWN = RawCodec("own.1")
