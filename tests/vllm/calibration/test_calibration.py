"""A model's cache, taken out of vLLM and put back by the calibration's own engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from engines.calibration.messages import CalibrationOrder
from engines.config import WRONG_SETTINGS, VllmConfig
from tests.vllm.rig.calibration_facts import CONTEXT, order
from tests.vllm.rig.engine import ROOT
from tests.vllm.rig.tiny_hybrids import write_windowed
from tests.vllm.rig.tiny_model import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, write_tiny_model

pytestmark = pytest.mark.vllm

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    words = [sys.executable, "-m", "tests.vllm.rig.calibration_facts", str(model)]
    done = subprocess.run(words, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("facts: ")] or [done.stderr]
    found: dict[str, Any] = json.loads(line.removeprefix("facts: "))
    return found


def test_what_is_taken_out(facts):
    assert facts["layout"] == [[KV_HEADS, CONTEXT, HEAD_DIM], LAYERS, "float32"]
    assert facts["shape"] == [88, VOCAB]
    assert facts["probabilities"] == pytest.approx(1, abs=1e-4)


def test_what_is_put_back_is_what_the_model_goes_on_from(facts):
    assert facts["again"] == 0, "the same past twice, and another request in between"
    assert facts["split"] < 1e-3
    assert facts["continued"] < 1e-3
    assert facts["other past"] > 0.1


def test_how_keys_are_turned(facts):
    assert facts["frequencies"] == pytest.approx([1e4 ** (-i / 32) for i in range(32)], abs=1e-5)
    assert not facts["interleaved"]


def test_the_profile_is_found_by_the_engine_that_serves(facts):
    assert facts["fingerprint"] == facts["serving"]


def ordered(given: CalibrationOrder) -> subprocess.CompletedProcess[bytes]:
    """Run the program with this order; its input stays open, because its end would end it."""
    with subprocess.Popen(
        [sys.executable, "-m", "engines.vllm_plugin.calibrate"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdin is not None and program.stderr is not None
        program.stdin.write(msgspec.json.encode(given) + b"\n")
        program.stdin.flush()
        stderr = program.stderr.read()
        return subprocess.CompletedProcess(program.args, program.wait(), b"", stderr)


def test_several_ranks_are_refused(tmp_path):
    given = order(str(tmp_path))
    several = msgspec.structs.replace(given, vllm=VllmConfig(tensor_parallel=2))
    done = ordered(several)
    assert done.returncode == WRONG_SETTINGS
    assert b"engine.vllm.tensor_parallel=1" in done.stderr


def test_state_that_no_codec_may_touch_is_refused(tmp_path):
    done = ordered(order(str(write_windowed(tmp_path))))
    assert done.returncode == WRONG_SETTINGS
    assert b"cannot be cut to a length" in done.stderr and b"Traceback" not in done.stderr
