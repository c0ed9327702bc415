"""What the instrument of a serving vLLM sees of its model and of KV, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from engines.calibration.orders import EARLY_WINDOWS
from engines.vllm_plugin.groups import DENSE
from engines.vllm_plugin.measuring.exchange import FoundRows
from engines.vllm_plugin.measuring.serving_instrument import ServingInstrument
from kvstore.shapes import KVLayer, KVLayout
from tests.vllm.rig.byte_tokenizer import write_tokenizer
from tests.vllm.rig.instrument import facts_of
from tests.vllm.rig.instrument_facts import CONTEXT
from tests.vllm.rig.tiny_families import write_gemma2, write_gpt_oss, write_int8, write_qwen3
from tests.vllm.rig.tiny_model import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# By what their layers have that attention as such has not.
MODELS: dict[str, Callable[[Path], Path]] = {
    "int8": write_int8,  # the projection's matrix is not to be read
    "norms": write_qwen3,
    "sinks": write_gpt_oss,
    "caps": write_gemma2,
}


BLOCK = 16
LAYOUT = KVLayout("float32", (KVLayer(1, 1, 1),))


class Blocks:
    """vLLM's whole blocks of what was ordered; a row is the number of its token."""

    was_alone = True

    def next_number(self) -> int:
        return 1

    def open(self, *order: Any, **more: Any) -> None:
        """Any order will do."""

    def order(self, number: int, tokens: Any, salt: str, wanted_from: int, **more: Any) -> None:
        self.first, self.end = wanted_from // BLOCK * BLOCK, -(-len(tokens) // BLOCK) * BLOCK

    def found(self, within_s: float) -> FoundRows:
        rows = np.arange(self.first, self.end, dtype=np.float32).reshape(1, -1, 1)
        return FoundRows([(rows, rows)], None)


@pytest.mark.parametrize("has_states", [False, True])
def test_rows_end_where_the_prompt_does_and_not_with_a_block(has_states):
    blocks: Any = Blocks()
    cache: Any = SimpleNamespace(layout=LAYOUT, block_tokens=BLOCK)
    states: Any = SimpleNamespace(layout="windows") if has_states else None
    instrument = ServingInstrument(blocks, blocks, cache, states, DENSE, "", None, "salt")
    for num_tokens in (1, 300):
        for side in instrument.rows(range(num_tokens))[0]:
            assert side.ravel().tolist() == [*range(num_tokens)]


def written(write: Callable[[Path], Path], folder: Path) -> str:
    write_tokenizer(write(folder))
    return str(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = written(write_tiny_model, tmp_path_factory.mktemp("model"))
    return facts_of("instrument", model, "instrument", "layer")


@pytest.fixture(scope="module")
def taken(plain: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = plain["instrument"]
    return facts


@pytest.fixture(
    scope="module",
    params=["plain", *(pytest.param(x, marks=pytest.mark.thorough) for x in MODELS)],
)
def layers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    if request.param == "plain":
        found = request.getfixturevalue("plain")
    else:
        model = written(MODELS[request.param], tmp_path_factory.mktemp("model"))
        found = facts_of("instrument", model, "layer")
    facts: dict[str, Any] = found["layer"]
    return facts


def test_what_is_taken_out(taken):
    assert taken["layout"] == [[KV_HEADS, CONTEXT, HEAD_DIM], LAYERS, "float32"]
    assert taken["shape"] == [88, VOCAB]
    assert taken["probabilities"] == pytest.approx(1, abs=1e-4)


def test_what_is_put_back_is_what_the_model_goes_on_from(taken):
    assert taken["again"] == 0, "the same past twice, and another request in between"
    assert taken["split"] < 1e-3
    assert taken["continued"] < 1e-3
    assert taken["other past"] > 0.1


def test_how_keys_are_turned(taken):
    assert taken["frequencies"] == pytest.approx([1e4 ** (-i / 32) for i in range(32)], abs=1e-5)
    assert not taken["interleaved"]


def test_gradients_foretell_what_an_error_does_to_a_layer(layers):
    assert len(layers["slopes"]) == 2 * LAYERS
    for measured, foretold in layers["slopes"]:
        assert measured == pytest.approx(foretold, rel=0.05)


def test_every_layer_is_seen_and_nothing_is_left_over(layers):
    assert layers["layers"] == [*range(LAYERS)]
    assert layers["shapes"] == [[3, heads, 160, dim] for heads, dim in layers["heads of layers"]]
    assert len(layers["shapes"]) == LAYERS
    assert layers["same run"]
    assert layers["hooks"] == 1, "the one on the module of logits"
    assert layers["metrics"] == layers["heads"]


def test_a_step_that_was_not_seen_or_is_anothers_is_refused(layers):
    assert "showed no queries" in layers["unseen"]
    assert "another request" in layers["another prompt"]


def test_a_layers_kernels_run_on_the_thread_of_the_model_alone(layers):
    """Those of CPUs are not safe for two threads: the engine ended by a signal while it served."""
    assert layers["products later"] == []


@pytest.mark.slow
@pytest.mark.thorough
def test_a_compiled_model_is_measured_as_others_are(tmp_path):
    (tmp_path / "model").mkdir()
    found = facts_of("serving_facts", written(write_tiny_model, tmp_path / "model"))
    assert found["compiled"], "torch.compile has the model"
    seen = f"{EARLY_WINDOWS} of {EARLY_WINDOWS} texts were observed"
    assert seen in found["notes"]
    assert not [x for x in found["notes"] if "count alike" in x]
    assert found["hooks"] == 1, "the one on the module of logits"
    assert found["kls"]["raw"] < 1e-6 and found["kls"]["tq4"] > 1e-5
