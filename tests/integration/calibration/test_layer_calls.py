"""What a layer makes of the K, V and states before it, differentiated by mlx and otherwise."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from engines.calibration.instrument import NUM_DRAWS, LayerNotice, NotObservable, StateNotice
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.measuring.instrument import MlxInstrument
from engines.mlx_worker.model.layer_calls import (
    PIECE_TOKENS,
    arrays_of,
    noted_calls,
    noted_rows,
    noted_states,
    with_array,
)
from kvstore.blobs.state_tree import MatrixArray
from kvstore.codecs.learning.attention import Attention, gradients
from tests.integration.calibration.surveys import instrument_of
from tests.integration.tiny_models import tiny_model

pytestmark = pytest.mark.mlx

TOKENS = [(7 * i + 3) % 400 for i in range(90)]
FIRST, SEED, STEP = 60, 4, 1e-2
LONG = [(7 * i + 3) % 400 for i in range(FIRST + 2 * PIECE_TOKENS + 5)]  # pieces, and a part


def noted(kind: str, tokens: list[int] = TOKENS) -> tuple[Any, Any, Any]:
    """The caches after these tokens and before the last of them, and what layers were given."""
    model = tiny_model(kind).model
    caches = make_prompt_cache(model)
    model(mx.array([tokens[:FIRST]]), cache=caches)
    mx.eval([x.state for x in caches])
    before = kv_arrays.copy_of(caches)
    with noted_calls(model, caches) as layers:
        model(mx.array([tokens[FIRST:]]), cache=caches)
    return caches, before, layers


def test_mlx_finds_the_derivative_that_was_made_by_hand() -> None:
    caches, before, layers = noted("llama")
    for number, rows in enumerate(noted_rows(caches, before, layers)):
        (call,) = layers[number].calls
        attention, given = call.module, call.given[0]
        count, heads = len(TOKENS) - FIRST, attention.n_heads
        queries = attention.q_proj(given).reshape(1, count, heads, -1).transpose(0, 2, 1, 3)
        queries = np.array(attention.rope(queries, offset=FIRST)[0])
        keys, values = kv_arrays.growing_run(caches, len(TOKENS))[number]
        drawn = [
            np.array(mx.random.normal(given.shape, key=mx.random.key(SEED * NUM_DRAWS + x))[0])
            for x in range(NUM_DRAWS)
        ]
        outer = np.stack(drawn) / np.array(call.sizes()) @ np.array(attention.o_proj.weight)
        cotangents = outer.reshape(NUM_DRAWS, count, heads, -1).swapaxes(1, 2)
        how = Attention(attention.scale)
        expected = gradients(how, queries, keys, values, cotangents, FIRST)
        notice = rows.begin(FIRST, SEED)()
        assert (notice.layer, notice.of_windows) == (number, False)
        for found, exact in zip(notice.gradients, expected, strict=True):
            np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_a_model_that_was_seen_is_as_it_was(kind: str) -> None:
    loaded = tiny_model(kind)
    instrument = MlxInstrument(loaded, probe(loaded.model))
    before = [dict(x.children()) for x in loaded.model.layers]
    run = instrument.prefill(TOKENS).run
    noticed: list[LayerNotice | StateNotice] = []
    seen = instrument.observe(TOKENS, FIRST, noticed.append)
    assert [dict(x.children()) for x in loaded.model.layers] == before
    for pair, other in zip(run, seen, strict=True):
        for array, exact in zip(pair, other, strict=True):
            np.testing.assert_allclose(array, exact, atol=1e-4)
    found = [x for x in noticed if isinstance(x, LayerNotice)]
    growing = [x.layer for x in found if not x.of_windows]
    assert growing == list(range(len(instrument.layout.layers)))
    for notice in found:
        for gradient in notice.gradients:
            assert gradient.shape[0] == NUM_DRAWS and gradient.shape[2] <= FIRST
            assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_windows_are_seen_while_they_hold_the_first_token() -> None:
    instrument = instrument_of("gemma3_text")
    states = instrument.states
    assert states.windows is not None
    for tokens, num_seen in (
        (TOKENS[: states.window_tokens], len(states.windows.layers)),
        (TOKENS, 0),
    ):
        found: list[LayerNotice] = []
        instrument.observe(tokens, len(tokens) - 8, found.append)
        assert sum(x.of_windows for x in found) == num_seen


def test_a_model_whose_layers_are_not_found_shows_nothing() -> None:
    model = tiny_model("llama").model
    caches = make_prompt_cache(model)
    with pytest.raises(NotObservable, match="is not found"):
        noted_rows(caches, kv_arrays.copy_of(caches), [])


# ---- states


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_gradients_foretell_what_an_error_does_to_a_layer(kind: str) -> None:
    """By the ends of small steps."""
    caches, before, layers = noted(kind, LONG)
    found = noted_states(caches, before, layers)
    assert found
    for number, state in enumerate(found):
        notice = state.begin(FIRST, SEED)()
        assert notice.number == number
        call, earlier, place = state._call, state._before, state._place
        drawn = mx.random.normal(call.given_shape, key=mx.random.key(SEED * NUM_DRAWS + 1))
        gradient = mx.array(notice.gradients[1])
        step = STEP * mx.linalg.norm(mx.array(notice.matrices)) / mx.linalg.norm(gradient)
        ends = []
        for sign in (1, -1):
            moved = arrays_of(earlier)[place] + sign * step * gradient
            cache = with_array(earlier, place, moved)
            ends.append((drawn * call.again(cache) / call.sizes()).sum().item())
        foretold = float((2 * step * mx.square(gradient).sum()).item())
        assert ends[0] - ends[1] == pytest.approx(foretold, rel=0.02)


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_arrays_are_numbered_as_they_lie_in_a_session(kind: str) -> None:
    loaded = tiny_model(kind)
    loaded.model.eval()
    instrument = MlxInstrument(loaded, probe(loaded.model))
    found: list[LayerNotice | StateNotice] = []
    instrument.observe(LONG, FIRST, found.append)
    states = {x.number: x for x in found if isinstance(x, StateNotice)}
    session = instrument.prefill(LONG[:FIRST])
    leaves = [x for _, x in tree_flatten(session.state)]
    arrays = [x for x in leaves if isinstance(x, MatrixArray)]
    assert sorted(states) == list(range(len(arrays)))
    for number, array in enumerate(arrays):
        np.testing.assert_allclose(states[number].matrices, array.array, atol=1e-4)
        assert states[number].gradients.shape == (NUM_DRAWS, *array.array.shape)
        assert np.abs(states[number].gradients).max() > 0
    assert not any(x.training for _, x in loaded.model.named_modules()), "it serves as before"
