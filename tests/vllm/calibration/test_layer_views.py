"""What the layers of a vLLM make of stored KV, seen in its own steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from tests.vllm.calibration.test_calibration import facts_of
from tests.vllm.rig.byte_tokenizer import write_tokenizer
from tests.vllm.rig.tiny_families import write_gemma2, write_gpt_oss, write_int8, write_qwen3
from tests.vllm.rig.tiny_model import LAYERS, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


# By what their layers have that attention as such has not.
MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": write_tiny_model,
    "int8": write_int8,  # the projection's matrix is not to be read
    "norms": write_qwen3,
    "sinks": write_gpt_oss,
    "caps": write_gemma2,
}


@pytest.fixture(
    scope="module",
    params=[x if x == "plain" else pytest.param(x, marks=pytest.mark.thorough) for x in MODELS],
)
def facts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    model = MODELS[request.param](tmp_path_factory.mktemp("model"))
    write_tokenizer(model)
    return facts_of("layer_facts", str(model))


def test_gradients_foretell_what_an_error_does_to_a_layer(facts: dict[str, Any]) -> None:
    assert len(facts["slopes"]) == 2 * LAYERS
    for measured, foretold in facts["slopes"]:
        assert measured == pytest.approx(foretold, rel=0.05)


def test_every_layer_is_seen_and_nothing_is_left_behind(facts: dict[str, Any]) -> None:
    assert facts["layers"] == [*range(LAYERS)]
    assert facts["shapes"] == [[3, heads, 160, dim] for heads, dim in facts["heads of layers"]]
    assert len(facts["shapes"]) == LAYERS
    assert facts["same run"]
    assert facts["hooks"] == 1, "the one on the module of logits"
    assert facts["metrics"] == facts["heads"]


def test_a_step_that_was_not_seen_or_is_anothers_is_refused(facts: dict[str, Any]) -> None:
    assert "showed no queries" in facts["unseen"]
    assert "another request" in facts["another prompt"]


def test_a_layers_kernels_run_on_the_thread_of_the_model_alone(facts: dict[str, Any]) -> None:
    """Those of CPUs are not safe for two threads: the engine ended by a signal while it served."""
    assert facts["products later"] == []
