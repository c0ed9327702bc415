"""A vLLM whose model is compiled sees which errors in stored KV matter, as others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from engines.calibration.orders import EARLY_WINDOWS
from tests.vllm.calibration.test_calibration import facts_of
from tests.vllm.rig.byte_tokenizer import write_tokenizer
from tests.vllm.rig.tiny_model import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model: Path = tmp_path_factory.mktemp("compiled") / "model"
    model.mkdir()
    write_tokenizer(write_tiny_model(model))
    return facts_of("serving_facts", str(model), "compiled")


def test_every_text_is_looked_back_on(facts: dict[str, Any]) -> None:
    assert facts["compiled"], "torch.compile has the model"
    seen = f"{EARLY_WINDOWS} of {EARLY_WINDOWS} texts were looked back on"
    assert seen in facts["notes"]
    assert not [x for x in facts["notes"] if "count alike" in x]


def test_nothing_is_left_behind(facts: dict[str, Any]) -> None:
    assert facts["hooks"] == 1, "the one on the module of logits"


def test_kv_that_is_given_and_taken_back_is_the_same(facts: dict[str, Any]) -> None:
    assert facts["kls"]["raw"] < 1e-6 and facts["kls"]["tq4"] > 1e-5
