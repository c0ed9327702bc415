"""What a recurrent layer makes of the state before it, differentiated by mlx and by small steps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from engines.calibration.instrument import NUM_DRAWS, LayerNotice, StateNotice
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.measuring.instrument import MlxInstrument
from engines.mlx_worker.model.layer_calls import (
    PIECE_TOKENS,
    arrays_of,
    noted_calls,
    noted_states,
    with_array,
)
from kvstore.blobs.state_tree import MatrixArray
from tests.integration.tiny_models import tiny_model

pytestmark = pytest.mark.mlx

FIRST, SEED, STEP = 40, 4, 1e-2
TOKENS = [(7 * i + 3) % 400 for i in range(FIRST + 2 * PIECE_TOKENS + 5)]  # pieces, and a part


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_gradients_foretell_what_an_error_does_to_a_layer(kind: str) -> None:
    model = tiny_model(kind).model
    caches = make_prompt_cache(model)
    model(mx.array([TOKENS[:FIRST]]), cache=caches)
    mx.eval([x.state for x in caches])
    before = kv_arrays.copy_of(caches)
    with noted_calls(model, caches) as layers:
        model(mx.array([TOKENS[FIRST:]]), cache=caches)
    found = noted_states(caches, before, layers)
    assert found
    for number, noted in enumerate(found):
        notice = noted.begin(FIRST, SEED)()
        assert notice.number == number
        call, earlier, place = noted._call, noted._before, noted._place
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
    instrument.observe(TOKENS, FIRST, found.append)
    states = {x.number: x for x in found if isinstance(x, StateNotice)}
    session = instrument.prefill(TOKENS[:FIRST])
    leaves = [x for _, x in tree_flatten(session.state)]
    arrays = [x for x in leaves if isinstance(x, MatrixArray)]
    assert sorted(states) == list(range(len(arrays)))
    for number, array in enumerate(arrays):
        np.testing.assert_allclose(states[number].matrices, array.array, atol=1e-4)
        assert states[number].gradients.shape == (NUM_DRAWS, *array.array.shape)
        assert np.abs(states[number].gradients).max() > 0
    assert not any(x.training for _, x in loaded.model.named_modules()), "it serves as before"
