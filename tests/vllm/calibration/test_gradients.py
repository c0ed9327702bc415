"""Gradients of the model that vLLM serves, from the reference model in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import psutil
import torch

from engines.calibration.instrument import NotDifferentiable
from engines.vllm_plugin.calibration.reference_check import MOST_ERROR, check_kv, check_scores
from engines.vllm_plugin.calibration.reference_model import read_folder
from engines.vllm_plugin.calibration.reference_size import KEPT_FREE_BYTES, ModelSize, dtype_for
from kvstore.shapes import KVPair
from tests.vllm.rig.device import skip_without_device
from tests.vllm.rig.engine import ROOT
from tests.vllm.rig.tiny_families import FAMILIES

pytestmark = pytest.mark.vllm

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
CPU = torch.device("cpu")
WORDS = {
    "another rotation": "another K than vLLM",
    "fewer layers": "vLLM caches 2 layers",
    "no class": "transformers cannot differentiate this model",
    "quantised": "quantised (fp8)",
    "other heads": "another V than vLLM",
    "other words": "predicts other tokens than vLLM",
    "no weights": "no safetensors",
    "no room": "a second copy of the weights",
}


@pytest.fixture(scope="module", params=FAMILIES)
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    skip_without_device()
    model = FAMILIES[request.param](tmp_path_factory.mktemp("model"))
    words = [sys.executable, "-m", "tests.vllm.rig.gradient_facts", str(model)]
    done = subprocess.run(words, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("facts: ")] or [done.stderr]
    return json.loads(line.removeprefix("facts: "))


def test_gradients_foretell_what_an_error_does_to_vllms_own_model(facts):
    assert len(facts["slopes"]) == 4
    for found, expected in facts["slopes"]:
        assert expected > 0
        assert found == pytest.approx(expected, rel=0.02)
    assert facts["shapes"] and facts["dtypes"] == ["float32"]


def test_what_is_learned_knows_what_matters(facts):
    assert facts["metrics"] == facts["heads"]
    assert facts["reference models"] == 0, "the second model is gone"


@pytest.mark.parametrize("wrong", WORDS)
def test_a_model_that_is_not_the_same_is_refused(facts, wrong):
    assert WORDS[wrong] in facts["refused"][wrong]
    assert "\n" not in facts["refused"][wrong]


def pair(seed: int) -> KVPair:
    random = np.random.default_rng(seed)
    keys, values = random.standard_normal((2, 3, 40, 16)).astype(np.float32)
    return keys, values


def rounded(array: np.ndarray) -> np.ndarray:
    found: np.ndarray = torch.from_numpy(array).bfloat16().float().numpy()
    return found


def test_bf16_is_no_other_model():
    ours, theirs = pair(0), pair(0)
    check_kv([ours], [(rounded(theirs[0]), rounded(theirs[1]))])
    theirs[1][:, :10] = 0  # a few tokens went to another expert
    check_kv([ours], [theirs])


@pytest.mark.parametrize("bad", [0.0, 1 + 1.5 * MOST_ERROR, np.nan])
def test_one_head_is_enough(bad):
    ours, theirs = pair(0), pair(0)
    theirs[0][2] *= bad
    with pytest.raises(NotDifferentiable, match="another K"):
        check_kv([ours], [theirs])


def test_another_vocabulary_is_refused():
    with pytest.raises(NotDifferentiable, match="8 tokens, transformers 9"):
        check_scores(np.zeros((4, 8)), np.zeros((4, 9)), [1] * 4)


def test_a_model_is_loaded_again_only_where_there_is_room():
    there = psutil.virtual_memory().available - KEPT_FREE_BYTES
    assert dtype_for(ModelSize(1000, 1000), CPU, 0) == torch.float32
    assert dtype_for(ModelSize(there // 6, 0), CPU, 0) == torch.bfloat16
    with pytest.raises(NotDifferentiable, match="GiB are to spare"):
        dtype_for(ModelSize(there, 0), CPU, 0)
    with pytest.raises(NotDifferentiable, match="GiB are to spare"):
        dtype_for(ModelSize(there // 6, 0), CPU, psutil.Process().memory_info().rss + there // 10)


def test_a_model_of_the_hub_is_where_vllm_left_it(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    (kept / "snapshots" / commit).mkdir(parents=True)
    (kept / "snapshots" / commit / "config.json").write_text("{}")
    model = SimpleNamespace(model="some/model", revision=None)
    assert read_folder(model, str(tmp_path)) == kept / "snapshots" / commit
    with pytest.raises(OSError):
        read_folder(SimpleNamespace(model="some/model", revision="other"), str(tmp_path))
