"""A sleeping session: its bytes, against those that the store really holds, and its codec."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engines.calibration.orders import first_order
from kvstore.blobs.packer import StoreCodecs
from kvstore.blobs.state_tree import MatrixArray, StateArray, StateTree, WindowArray, state_nbytes
from kvstore.codecs.base import Codec
from kvstore.codecs.names import READY
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import open_session_codec
from kvstore.config import StoreConfig
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayer, KVLayout, StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.store.states import StateAt
from kvstore.tiers.ram_tier import RamTier
from launch.families.cache_shape import CacheShape, Window
from launch.families.table import cache_shape
from launch.plan.cold_size import cold_size, first_measurement
from launch.settings.effective_settings import EffectiveSettings, effective_settings
from launch.settings.sources import Value
from tests.kv_sessions import Rows, chain_of, kv_of, np, ref, tokens
from tests.unit.launch.plan.published import DEEPSEEK_V3, GEMMA3_27B, LLAMA_8B

GIB = 1 << 30
STORE = StoreConfig(ram_bytes=4 * GIB, disk_bytes=16 * GIB)
TINY = CacheShape((KVLayer(2, 64, 64),) * 3)


def held_bytes(
    model: StoredModel,
    codecs: Codec | StoreCodecs,
    num_tokens: int,
    states: Sequence[StateAt] = (),
) -> int:
    """What a session takes in a real tier."""
    tier = RamTier(GIB)
    with closing(ColdStore(STORE, model, codecs, [tier])) as store:
        ids = tokens(num_tokens)
        store.save(
            ref(),
            chain_of(store, ref(), ids),
            Rows(store, kv_of(ids, model.layout), states),
            states=[x.position // store.chunk_tokens for x in states],
            state_bytes=sum(state_nbytes(x.tree) for x in states),
        )
        assert store.flush(240)
        return tier.stats().nbytes


@pytest.mark.parametrize("num_tokens", [32, 100, 128, 1000])
@pytest.mark.parametrize("codec", sorted(READY))
def test_a_session_that_was_really_stored_takes_as_much(codec, num_tokens):
    layout = KVLayout("bfloat16", TINY.growing)
    held = held_bytes(StoredModel("m", "f", layout), codec_by_name(codec), num_tokens)
    expected = cold_size(TINY, codec_by_name(codec), "bfloat16", num_tokens).total
    assert held == pytest.approx(expected, rel=0.01, abs=300)


def test_states_are_counted_each():
    shape = CacheShape(TINY.growing, state_float32=5000)
    model = StoredModel("m", "f", KVLayout("bfloat16", TINY.growing), True)
    state: StateTree = [StateArray("float32", np.zeros(5000, np.float32))]
    states = [StateAt(x, state) for x in (704, 992)]
    held = held_bytes(model, codec_by_name("tq3"), 1000, states)
    expected = cold_size(shape, codec_by_name("tq3"), "bfloat16", 1000).total
    assert held == pytest.approx(expected, rel=0.01)


def test_packed_windows_are_counted_once_and_matrices_as_they_are_stored():
    window = Window(KVLayer(1, 32, 32), 512)
    shape = CacheShape(TINY.growing, (window,) * 2, state_float32=64 * 80, state_width=64)
    states = shape.states("bfloat16")
    assert states.windows is not None and states.has_matrices
    codec = open_session_codec("tq3+state8", None, states)
    layout = KVLayout("bfloat16", TINY.growing)
    model = StoredModel("m", "f", layout, True, states.windows, states.window_tokens)
    taken = [StateAt(x, state_of(x, states.window_tokens)) for x in (736, 992)]
    held = held_bytes(model, StoreCodecs(codec.kv, codec), 1000, taken)
    expected = cold_size(shape, codec, "bfloat16", 1000)
    assert held == pytest.approx(expected.total, rel=0.01)
    exact = cold_size(shape, codec.kv, "bfloat16", 1000)
    assert exact.states - expected.states > 0.7 * shape.state_bytes(1000, 2)


def state_of(position: int, window_tokens: int) -> StateTree:
    """Windows whose rows follow from their place in the session, and a matrix."""
    rows = np.random.default_rng(1).standard_normal((1, 1, position, 32)).astype(np.float32)
    held = (rows[:, :, -window_tokens:].view(np.uint32) >> 16).astype(np.uint16)
    matrix = np.random.default_rng(position).standard_normal((1, 80, 64)).astype(np.float32)
    windows = [WindowArray("bfloat16", held, i) for i in range(4)]
    return [*windows, MatrixArray("float32", matrix)]


def test_a_codec_that_must_not_pack_a_cache_is_refused():
    with pytest.raises(UnknownCodec, match="a sparse index"):
        sparse = {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128}
        cold_size(cache_shape(sparse), codec_by_name("tq3"), "bfloat16", 10)


def settings_of(folder: Path, config: dict[str, Any]) -> EffectiveSettings:
    (folder / "config.json").write_text(json.dumps(config))
    fields = {
        "engine.kind": "mlx",
        "engine.model": str(folder),
        "engine.hot_bytes": 2 * GIB,
        "store.ram_bytes": GIB,
    }
    layer = {name: Value(value, "test") for name, value in fields.items()}
    return effective_settings([layer], {"HOME": str(folder)})


@pytest.fixture
def effective(tmp_path: Path) -> EffectiveSettings:
    return settings_of(tmp_path, LLAMA_8B)


def test_it_names_the_presets_of_the_engines_own_order(effective):
    outlook = first_measurement(effective)
    order = first_order(effective.settings.store, LLAMA_8B["max_position_embeddings"], "")
    assert outlook.will_be and ", ".join(order.presets) in outlook.text
    assert "26 prompts of 1,000 tokens" in outlook.text


def test_windows_are_learned_and_judged_by_more(tmp_path):
    text = first_measurement(settings_of(tmp_path, GEMMA3_27B)).text
    assert "39 prompts of 1,000 tokens" in text


def test_a_context_too_short_to_pack_is_not_measured(tmp_path):
    short = settings_of(tmp_path, LLAMA_8B | {"max_position_embeddings": 200})
    outlook = first_measurement(short)
    assert not outlook.will_be
    assert "at most 200 tokens" in outlook.text and "thermocline calibrate" in outlook.text
