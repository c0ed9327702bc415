"""Layouts of models by their configuration."""

from __future__ import annotations

import json

import pytest

from thermocline import KVLayer, KVLayout, layout_of

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float16",
}


class Config:
    def to_dict(self):
        return CONFIG


class Model:
    config = Config()


def test_a_configuration_says_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    right = KVLayout("float16", (KVLayer(2, 64, 64),) * 2)
    for model in (CONFIG, Config(), Model(), tmp_path, str(tmp_path)):
        assert layout_of(model) == right
    assert layout_of(CONFIG | {"torch_dtype": None}).dtype == "bfloat16"


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="not known here"):
        layout_of(CONFIG | {"model_type": "nosuch"})
