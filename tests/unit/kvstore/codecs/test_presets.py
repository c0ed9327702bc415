from __future__ import annotations

import pytest

from kvstore.codecs.presets import PRESETS, codec_by_name, warm
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.seeds import SEEDS
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout
from tests.unit.kvstore.codecs.samples import layout_of


def test_every_name_gives_the_codec_of_that_name():
    for name in [*PRESETS, *SEEDS]:
        assert codec_by_name(name).id.split(".")[0] == name


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownCodec, match="'tq9'; there are raw, lm3, tq3, tq4"):
        codec_by_name("tq9")


def test_an_import_string_is_a_codec_or_makes_one():
    assert isinstance(codec_by_name("kvstore.codecs.raw:RawCodec"), RawCodec)
    assert codec_by_name(f"{__name__}:OWN") is OWN


@pytest.mark.parametrize("name", ["nowhere:Codec", "kvstore.codecs.raw:Nothing", ":", "a:", "..:x"])
def test_an_import_string_that_leads_nowhere(name):
    with pytest.raises(UnknownCodec):
        codec_by_name(name)


@pytest.mark.parametrize("name", PRESETS)
def test_warming_takes_any_layout(name):
    warm(codec_by_name(name), layout_of(64))
    warm(codec_by_name(name), KVLayout("float32", ()))


OWN = RawCodec("own.1")
