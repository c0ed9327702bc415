"""A method for each layer: the rows that each packs, and the tables that are refused."""

from __future__ import annotations

import numpy as np
import pytest

import thermocline
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_run
from thermocline import Corrupt, UnknownCodec


def test_each_layer_is_packed_by_its_own_method():
    layout = model_layout("float32")
    run = model_run(layout, 40)
    method = thermocline.per_layer({0: "raw", -1: thermocline.codec("tq8"), "default": "tq2"})
    packed = method.pack_run(run)
    assert packed.nbytes == method.nbytes(40, layout)
    back = method.restore_run(packed)
    for layer, name in enumerate(("raw", "tq2", "tq8")):
        alone = thermocline.codec(name)
        (right,) = alone.restore_run(alone.pack_run([run[layer]]))
        for one, other in zip(back[layer], right, strict=True):
            assert np.array_equal(one, other), name
    assert method.frombytes(packed.tobytes()).nbytes == packed.nbytes
    for cut in (packed.payload[:-1], bytes(packed.payload) + b"0"):
        with pytest.raises(Corrupt):
            method.codec.decode(memoryview(cut), layout, 0, layout.empty(40))


def test_other_methods_are_another_method():
    ids = {
        thermocline.per_layer(x).id
        for x in (
            {"default": "tq3"},
            {"default": "tq4"},
            {0: "tq4", "default": "tq3"},
            {1: "tq4", "default": "tq3"},
        )
    }
    assert len(ids) == 4 and all(len(x) <= 24 for x in ids)
    assert thermocline.per_layer({0: "raw", "default": "raw"}).exact


def test_a_key_that_is_no_layer_is_refused():
    with pytest.raises(ValueError, match="for 'default'"):
        thermocline.per_layer({0: "tq3"})
    with pytest.raises(ValueError, match="neither a number nor"):
        thermocline.per_layer({"first": "tq3", "default": "tq4"})
    with pytest.raises(UnknownCodec, match="no codec named"):
        thermocline.per_layer({"default": "tq99"})
    far = thermocline.per_layer({3: "tq3", "default": "tq4"})
    with pytest.raises(UnknownCodec, match="layer 3 is named, and there are 3"):
        far.codec.check(model_layout())
    with pytest.raises(UnknownCodec):
        far.pack_run(model_run(model_layout(), 9))
