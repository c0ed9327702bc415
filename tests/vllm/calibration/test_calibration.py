"""A model's cache, taken out of a serving vLLM and put back, and measurements by order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fields import fields

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from engines.config import REPORT, CalibrationOrder, CalibrationReport
from engines.wire import CodecReport, Measure, MeasurementEnd
from kvstore.codecs.profile import load_profile
from kvstore.config import StoreConfig
from tests.vllm.rig.byte_tokenizer import write_tokenizer
from tests.vllm.rig.device import skip_without_device
from tests.vllm.rig.engine import BLOCK, ROOT, RealEngine
from tests.vllm.rig.instrument_facts import CONTEXT
from tests.vllm.rig.measuring_front import MeasuringFront, measuring_engine
from tests.vllm.rig.session_facts import EARLIER
from tests.vllm.rig.tiny_hybrids import write_gated_delta, write_recurrent, write_windowed
from tests.vllm.rig.tiny_model import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    write_tokenizer(model)
    return facts_of("instrument_facts", str(model))


def facts_of(program: str, *words: str) -> dict[str, Any]:
    """What a program of the rig has seen."""
    skip_without_device()
    command = [sys.executable, "-m", f"tests.vllm.rig.{program}", *words]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == -signal.SIGILL:  # int8 products on some virtual machines with AMX
        pytest.skip("a kernel of vLLM's wheel has an instruction that this processor lacks")
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


class Measured:
    """An engine that measures by order."""

    def __init__(self, engine: RealEngine) -> None:
        self._engine = engine
        self._front = MeasuringFront(engine)
        self._last: MeasurementEnd | None = None

    def end(self, order: CalibrationOrder) -> str:
        """Carry out an order; returns the reason why it failed, "" if it did not."""
        self._engine.control(Measure(order))
        self._front.run_until(self._has_ended)
        self._last = self._codec.ended
        return self._last.error

    def report(self, **order: Any) -> CalibrationReport:
        path = Path(self._engine.settings.runtime_dir) / REPORT
        path.unlink(missing_ok=True)
        assert self.end(self.order(**order)) == ""
        return msgspec.json.decode(path.read_bytes(), type=CalibrationReport)

    def order(self, **order: Any) -> CalibrationOrder:
        usual = fields("num_windows=2 window_tokens=256 num_scored=32 depths=() num_chains=0")
        usual |= {"presets": ("raw", "tq4", "dense3"), "contexts": (256,)}
        return CalibrationOrder(**(usual | order))

    @property
    def _codec(self) -> CodecReport:
        codec = self._engine.report().codec
        assert codec is not None
        return codec

    def _has_ended(self) -> bool:
        codec = self._codec
        return codec.ended not in (None, self._last) and not codec.progress

    def close(self) -> None:
        self._front.close()


@contextmanager
def measured(folder: Path, write: Callable[[Path], Path], **options: Any) -> Iterator[Measured]:
    store = StoreConfig(codec="raw", calibrate=False, ram_bytes=1 << 24, disk_bytes=0)
    options = {"max_model_len": 400} | options
    with measuring_engine(folder, write, store, **options) as engine:
        found = Measured(engine)
        yield found
        found.close()


@pytest.mark.parametrize(
    "num_ranks, presets",
    [
        (1, ("raw", "tq4")),  # dense3 is learned by one rank in test_serving_measurement.py
        pytest.param(2, ("raw", "tq4", "dense3"), marks=pytest.mark.thorough),
    ],
)
def test_an_order_is_carried_out_by_all_ranks(num_ranks, presets, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be one core for both
    with measured(tmp_path, write_tiny_model, tensor_parallel_size=num_ranks) as engine:
        report = engine.report(presets=presets)
        rows = {x.preset: x for x in report.rows}
        assert tuple(rows) == presets
        assert rows["raw"].kl < 1e-6 < rows["tq4"].kl
        assert load_profile(Path(report.profile)).fingerprint == report.fingerprint
        profiles = [load_profile(x) for x in Path(report.profile).parent.glob("*.tcpf")]
        assert len(profiles) == num_ranks
        assert {x.rows[1].kl for x in profiles} == {rows["tq4"].kl}, "the ranks have one verdict"


# Block sizes that a tiny model's prompts have several of.
FAMILIES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "windows": (write_windowed, {}),
    "convolutions": (write_recurrent, {"mamba_block_size": BLOCK}),
}


def families(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.thorough(pytest.mark.parametrize("name", FAMILIES)(test))


@families
def test_a_model_with_states_is_measured_whole(name, tmp_path):
    write, options = FAMILIES[name]
    with measured(tmp_path, write, **options) as engine:
        report = engine.report()
    rows = {x.preset: x for x in report.rows}
    assert rows["raw"].kl < 1e-6, "the rows that come back are the computed ones"
    assert rows["tq4"].kl > 1e-6 and rows["dense3"].kl > 1e-6, "and a codec's loss is seen"
    assert load_profile(Path(report.profile)).fingerprint == report.fingerprint


@families
def test_a_context_without_a_state_is_refused(name, tmp_path):
    write, options = FAMILIES[name]
    large = {**options, "block_size": 512, "mamba_block_size": 512}
    with measured(tmp_path, write, **large) as engine:
        assert "every 512th token" in engine.end(engine.order())


@pytest.mark.thorough
def test_matrices_of_states_are_measured_packed(tmp_path):
    with measured(tmp_path, write_gated_delta, dtype="bfloat16", max_model_len=960) as engine:
        # vLLM chooses the tokens between two states by the machine's processor.
        said = re.search(
            r"every (\d+)th token only; ask for contexts of (\d+) tokens or more",
            engine.end(engine.order()),
        )
        step, least = map(int, said.groups())
        assert least == 4 * step, "four sleeps judge a state"
        too_short = engine.order(contexts=(least - 1,))
        assert f"contexts of {least} tokens or more" in engine.end(too_short)
        report = engine.report(presets=("raw", "tq4"), contexts=(900,))
    rows = {x.preset: x for x in report.rows}
    assert rows["raw"].kl < 1e-6 < rows["tq4+state8"].kl
    assert rows["raw"].context == 900 // step * step, "what follows is not packed"
    assert 16 < rows["raw"].bits_per_element < 20, "bf16, and states in float32"
    assert rows["tq4+state8"].bits_per_element < 6


@families
def test_a_session_goes_on_from_the_state_it_is_given(name, tmp_path):
    write, options = FAMILIES[name]
    (tmp_path / "model").mkdir()
    write_tokenizer(write(tmp_path / "model"))
    found = facts_of("session_facts", str(tmp_path / "model"), json.dumps(options))
    earlier = EARLIER // BLOCK * BLOCK
    assert found["tokens"] == [earlier, earlier, CONTEXT, CONTEXT]
    assert found["later"] < 1e-3 and found["rows alone"] < 1e-3
    assert found["wrong"] > 1e-2
    if name == "windows":  # the scores of the other hang on how its prompt was cut
        assert found["scores"] < 1e-3
