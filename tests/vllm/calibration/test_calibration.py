"""A model's cache, taken out of vLLM and put back by the calibration's own engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from engines.calibration.messages import CalibrationOrder, CalibrationReport
from engines.config import WRONG_SETTINGS, VllmConfig
from kvstore.codecs.profile import load_profile
from tests.vllm.rig.byte_tokenizer import write_tokenizer
from tests.vllm.rig.calibration_facts import CONTEXT, order
from tests.vllm.rig.device import skip_without_device
from tests.vllm.rig.engine import BLOCK, ROOT
from tests.vllm.rig.session_facts import EARLIER
from tests.vllm.rig.tiny_hybrids import write_gated_delta, write_recurrent, write_windowed
from tests.vllm.rig.tiny_model import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, write_tiny_model

pytestmark = pytest.mark.vllm

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    return facts_of("calibration_facts", str(model))


def facts_of(program: str, *words: str) -> dict[str, Any]:
    """What a program of the rig has seen."""
    skip_without_device()
    command = [sys.executable, "-m", f"tests.vllm.rig.{program}", *words]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
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
        assert program.stdout is not None
        stdout = program.stdout.read()  # of one line: it waits in the pipe
        return subprocess.CompletedProcess(program.args, program.wait(), stdout, stderr)


def test_several_ranks_are_refused(tmp_path):
    given = order(str(tmp_path))
    several = msgspec.structs.replace(given, vllm=VllmConfig(tensor_parallel=2))
    done = ordered(several)
    assert done.returncode == WRONG_SETTINGS
    assert b"thermocline calibrate --url" in done.stderr


QUICK = {
    "contexts": (256,),
    "num_windows": 2,
    "window_tokens": 256,
    "num_scored": 32,
    "depths": (),
    "num_chains": 0,
    "with_bounds": False,
}
# Block sizes that a tiny model's prompts have several of.
FAMILIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "windows": (write_windowed, ()),
    "convolutions": (write_recurrent, ("--mamba-block-size", str(BLOCK))),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CalibrationOrder:
    skip_without_device()
    write, args = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    (folder / "model").mkdir()
    write_tokenizer(write(folder / "model"))
    order = CalibrationOrder(
        model_path=str(folder / "model"),
        vllm=VllmConfig(args=args),
        presets=("raw", "tq4", "dense3"),
        data_path=str(folder / "data"),
        **QUICK,
    )
    return order


def test_a_model_with_states_is_measured_whole(family):
    done = ordered(family)
    assert done.returncode == 0, done.stderr.decode()
    report = msgspec.json.decode(done.stdout, type=CalibrationReport)
    rows = {x.preset: x for x in report.rows}
    assert rows["raw"].kl == 0, "the rows that come back are the computed ones"
    assert rows["tq4"].kl > 1e-6 and rows["dense3"].kl > 1e-6, "and a codec's loss is seen"
    assert load_profile(Path(report.profile)).fingerprint == report.fingerprint


def test_a_context_without_a_state_is_refused(family):
    large = VllmConfig(args=("--block-size", "512", "--mamba-block-size", "512"))
    done = ordered(msgspec.structs.replace(family, vllm=large))
    assert done.returncode == WRONG_SETTINGS
    assert b"every 512th token" in done.stderr and b"Traceback" not in done.stderr


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> CalibrationOrder:
    skip_without_device()
    folder = tmp_path_factory.mktemp("matrices")
    (folder / "model").mkdir()
    write_tokenizer(write_gated_delta(folder / "model"))
    return CalibrationOrder(
        model_path=str(folder / "model"),
        dtype="bfloat16",
        presets=("raw", "tq4"),
        data_path=str(folder / "data"),
        **{**QUICK, "contexts": (900,)},
    )


@pytest.fixture(scope="module")
def state_step(matrices: CalibrationOrder) -> int:
    """The tokens between two states, which vLLM chooses by the machine's processor.

    Read off the refusal of a context that is too short by any choice.
    """
    done = ordered(msgspec.structs.replace(matrices, contexts=(256,)))
    assert done.returncode == WRONG_SETTINGS
    said = re.search(rb"every (\d+)th token only; ask for contexts of (\d+) tokens", done.stderr)
    assert said is not None, done.stderr.decode()
    step, least = map(int, said.groups())
    assert least == 4 * step, "four sleeps judge a state"
    return step


def test_matrices_of_states_are_measured_packed(matrices, state_step):
    done = ordered(matrices)
    assert done.returncode == 0, done.stderr.decode()
    rows = {x.preset: x for x in msgspec.json.decode(done.stdout, type=CalibrationReport).rows}
    assert rows["raw"].kl == 0 and rows["tq4+state8"].kl > 1e-6
    assert rows["raw"].context == 900 // state_step * state_step, "what follows is not packed"
    assert 16 < rows["raw"].bits_per_element < 20, "bf16, and states in float32"
    assert rows["tq4+state8"].bits_per_element < 6


def test_a_context_with_fewer_sleeps_than_judge_a_state_is_refused(matrices, state_step):
    done = ordered(msgspec.structs.replace(matrices, contexts=(4 * state_step - 1,)))
    assert done.returncode == WRONG_SETTINGS
    assert f"contexts of {4 * state_step} tokens or more".encode() in done.stderr


@pytest.mark.parametrize("name", FAMILIES)
def test_a_session_goes_on_from_the_state_it_is_given(name, tmp_path):
    write, args = FAMILIES[name]
    write(tmp_path)
    found = facts_of("session_facts", str(tmp_path), *args)
    earlier = EARLIER // BLOCK * BLOCK
    assert found["tokens"] == [earlier, earlier, CONTEXT, CONTEXT]
    assert found["later"] < 1e-3 and found["rows alone"] < 1e-3
    assert found["wrong"] > 1e-2
    if name == "windows":  # the scores of the other hang on how its prompt was cut
        assert found["scores"] < 1e-3
