"""Methods of one's own: registered, they are known wherever a codec is named."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest

import thermocline
from kvstore.codecs.base import RawCodec
from kvstore.codecs.calibrated import calibrated_codec
from kvstore.codecs.names import CODECS
from kvstore.codecs.presets import check_name, codec_by_name
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.config import StoreConfig
from kvstore.errors import UnknownCodec
from launch.calibrate.program import presets_of
from launch.errors import UsageError
from launch.settings.effective_settings import effective_settings
from launch.settings.sources import Value
from tests.unit.kvstore.codecs.learning.calibration import (
    model_layout,
    model_run,
    ropes_of,
)
from tests.unit.kvstore.codecs.samples import uneven


def mine(bits: int = 5) -> RowCodec:
    """Rotates rows, as an example. More words."""
    return RowCodec(f"mine{bits}.1", RotatedRows(bits))


def test_a_registered_method_is_a_method_like_any_other():
    thermocline.register("mine", mine, paper="none yet")
    row = thermocline.codecs()["mine"]
    assert (row.bits, row.needs_profile, row.paper) == (5.125, False, "none yet")
    assert row.sentence == "Rotates rows, as an example."
    assert [(x.name, x.usual) for x in row.parameters] == [("bits", 5)]
    rows = uneven((2, 20, 64))
    method = thermocline.codec("mine", bits=2)
    assert method.bits() == 2.125 and method.id.startswith("mine2.1-")
    same = thermocline.codec("tq2")
    assert np.array_equal(method.restore(method.pack(rows)), same.restore(same.pack(rows)))
    check_name("mine:bits=2+window4")
    assert presets_of("mine:bits=2,tq3") == ("mine:bits=2", "tq3")
    assert "mine" in presets_of("all")
    with pytest.raises(UnknownCodec, match="any whole number is wanted"):
        thermocline.codec("mine", bits=2.5)


def test_a_method_can_be_an_import_string_and_be_replaced():
    thermocline.register("mine", f"{__name__}:mine", parameters=())
    assert thermocline.codecs()["mine"].bits == 5.125
    thermocline.register("mine", RawCodec)
    assert codec_by_name("mine").exact


@pytest.mark.parametrize(
    ("name", "make", "error", "why"),
    [
        ("tq3", mine, ValueError, "there is a method 'tq3' already"),
        ("tq", mine, ValueError, "already"),
        ("Mine+", mine, ValueError, "small letters"),
        ("mine", None, ValueError, "neither be made nor learned"),
        ("mine", "kvstore.codecs.base:Nothing", UnknownCodec, "cannot be imported"),
        ("mine", object, UnknownCodec, "is no codec"),
        ("mine", lambda: RawCodec("x" * 25), UnknownCodec, "more than 24 characters"),
    ],
)
def test_a_method_that_cannot_be_registered_leaves_the_table_as_it_was(name, make, error, why):
    before = dict(CODECS)
    with pytest.raises(error, match=why):
        thermocline.register(name, make)
    assert before == CODECS


@dataclass(frozen=True)
class Widths:
    """Learns nothing but a number for each model."""

    scale: float = 2.0

    def learn(self, samples, means):
        return {"scale": np.full(1, self.scale, np.float32)}

    def assemble(self, profile, learned, layout):
        from kvstore.codecs.literature.stages.levels import rotated_levels
        from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes

        bits = int(learned["scale"][0])
        return [rotated_levels(shape, bits) for shape in stack_shapes(Scope("head"), layout)]


def test_a_method_that_learns_is_learned_and_opened_by_its_profile():
    thermocline.register("widths", None, Widths())
    assert thermocline.codecs()["widths"].needs_profile
    layout = model_layout("float32")
    run = model_run(layout, 200)
    samples = thermocline.Samples(layout, ropes_of(layout), [run])
    profile = thermocline.learn(samples, "widths", "widths:scale=4")
    coarse = thermocline.codec("widths", profile=profile)
    fine = thermocline.codec("widths", scale=4, profile=profile)
    assert coarse.id != fine.id and calibrated_codec("widths", profile).id == coarse.id
    errors = [
        np.mean((x.restore_run(x.pack_run(run))[1][0] - run[1][0]) ** 2) for x in (coarse, fine)
    ]
    assert errors[1] < errors[0] / 4
    with pytest.raises(UnknownCodec, match="calibrate --presets widths:scale=3"):
        thermocline.codec("widths", scale=3, profile=profile)


def test_settings_import_the_modules_that_register(tmp_path, monkeypatch):
    module = tmp_path / "my_methods_a.py"
    module.write_text(f"import thermocline\nthermocline.register('ownrows', '{__name__}:mine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    layer = {
        "store.codec_modules": Value(["my_methods_a"], "here"),
        "store.codec": Value("ownrows:bits=2", "here"),
        "engine.kind": Value("fake", "here"),
    }
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    found = effective_settings([layer], {}).settings.store
    assert isinstance(found, StoreConfig) and found.codec == "ownrows:bits=2"
    layer["store.codec_modules"] = Value(["my_methods_b"], "here")
    with pytest.raises(UsageError, match="my_methods_b cannot be imported"):
        effective_settings([layer], {})
