"""A vLLM measures its own model while it serves: by itself and by order, rank by rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.calibration.gate.profiles import profile_path
from engines.config import REPORT, CalibrationOrder, CalibrationReport
from engines.wire import CodecReport, Measure, MeasurementEnd
from kvstore.codecs.profile import Profile, load_profile
from kvstore.config import StoreConfig
from tests.fields import fields
from tests.vllm.rig.engine import BLOCK, RealEngine, opened
from tests.vllm.rig.measuring_front import MeasuringFront, measuring_engine
from tests.vllm.rig.tiny_families import write_gated_delta, write_recurrent, write_windowed
from tests.vllm.rig.tiny_model import HEAD_DIM, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOM = {"ram_bytes": 1 << 28, "disk_bytes": 1 << 28}
NUM_TOKENS = 300


class Measuring:
    """An engine, and the orders that it gets."""

    def __init__(self, engine: RealEngine) -> None:
        self.engine = engine
        self._front = MeasuringFront(engine)
        self._last: MeasurementEnd | None = None

    @property
    def codec(self) -> CodecReport:
        codec = self.engine.report().codec
        assert codec is not None
        return codec

    @property
    def profiles(self) -> list[Profile]:
        folder = profile_path(Path(self.engine.settings.disk_path), "x").parent
        return [load_profile(x) for x in folder.glob("*.tcpf")]

    def until_ended(self) -> None:
        """Carry out the requests of the measurement that is under way, to its end."""
        self._front.run_until(self._has_ended)

    def end(self, order: CalibrationOrder) -> str:
        """Carry out an order; returns the reason why it failed, "" if it did not."""
        self._last = self.codec.ended
        self.engine.control(Measure(order))
        self.until_ended()
        ended = self.codec.ended
        assert ended is not None
        return ended.error

    def _has_ended(self) -> bool:
        codec = self.codec
        return codec.ended not in (None, self._last) and not codec.progress

    def report(self, **order: Any) -> CalibrationReport:
        assert self.end(order_of(**order)) == ""
        path = Path(self.engine.settings.runtime_dir) / REPORT
        return msgspec.json.decode(path.read_bytes(), type=CalibrationReport)

    def close(self) -> None:
        self._front.close()


def order_of(**order: Any) -> CalibrationOrder:
    usual = fields("num_windows=2 window_tokens=256 num_scored=32 depths=() num_chains=0")
    return CalibrationOrder(**(usual | {"presets": ("raw", "tq4"), "contexts": (256,)} | order))


def kls_of(rows: Any) -> dict[str, float]:
    return {x.preset: x.kl for x in rows}


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.thorough)],
    ids=["one rank", "two ranks"],
)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Measuring]:
    store = StoreConfig(codec="auto", learn_on=False, **ROOM)
    options = {"max_model_len": 400}  # a quick measurement: of 256 tokens
    options |= {"tensor_parallel_size": request.param}
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be one core for both
        with measuring_engine(folder, write_tiny_model, store, **options) as engine:
            measuring = Measuring(engine)
            yield measuring
            measuring.close()


def test_it_ends_measured_without_a_restart(ranks, sessions):
    engine = ranks.engine
    num_ranks = engine.engine.vllm_config.parallel_config.world_size
    assert ranks.codec.unmeasured
    ranks.until_ended()
    assert not ranks.codec.unmeasured
    measured = ranks.profiles
    assert len(measured) == num_ranks
    figures = [[(x.preset, x.kl, x.top1, x.bits_per_element) for x in p.rows] for p in measured]
    assert figures[0] == figures[-1], "the ranks have one verdict"
    assert kls_of(measured[0].rows)["dense3"] > 1e-5, "a codec's loss is seen"
    # It serves as before.
    first = engine.ask(sessions[0][:300], "after", tokens=8)
    engine.wait_saved("after")
    assert engine.forget_local()
    assert engine.ask(sessions[0][:300], "after", tokens=8).restored > 0
    assert first.tokens


def test_an_order_is_carried_out_by_all_ranks(ranks):
    report = ranks.report()
    kls = kls_of(report.rows)
    assert tuple(kls) == ("raw", "tq4")
    assert kls["raw"] < 1e-6 < kls["tq4"]
    assert load_profile(Path(report.profile)).fingerprint == report.fingerprint
    assert {kls_of(x.rows)["tq4"] for x in ranks.profiles} == {kls["tq4"]}


# Quick measurements: of 128 tokens.
FAMILIES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "windowed": (write_windowed, {}),
    "convolutions": (write_recurrent, {"mamba_block_size": BLOCK}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_states_is_measured_by_whole_sessions(family, tmp_path, sessions, capfd):
    write, options = FAMILIES[family]
    store = StoreConfig(codec="auto", calibrate=True, learn_on=False, **ROOM)
    with measuring_engine(tmp_path, write, store, max_model_len=340, **options) as engine:
        measuring = Measuring(engine)
        assert measuring.codec.unmeasured
        measuring.until_ended()
        assert not measuring.codec.unmeasured
        assert "count alike" not in capfd.readouterr().err, "which errors matter was seen"
        (profile,) = measuring.profiles
        packed = next(x.kl for x in profile.rows if x.preset.startswith("dense3"))
        assert packed > 1e-5, "a codec's loss is seen"
        kls = kls_of(measuring.report(contexts=(128,), window_tokens=160).rows)
        assert kls["raw"] < 1e-6 < kls["tq4"], "the rows that come back are the computed ones"
        measuring.close()
        first = engine.ask(sessions[0][:NUM_TOKENS], "after", tokens=8)
        engine.wait_saved("after")
        assert engine.forget_local()
        again = engine.ask(sessions[0][:NUM_TOKENS], "after", tokens=8)
        assert again.restored == NUM_TOKENS // BLOCK * BLOCK
        # Which preset restores in time is a matter of this machine.
        if measuring.codec.id.startswith("raw"):
            assert again.tokens == first.tokens


@pytest.mark.thorough
def test_matrices_of_states_are_measured_packed(tmp_path):
    store = StoreConfig(codec="raw", calibrate=False, ram_bytes=1 << 24, disk_bytes=0)
    sizes = {"dtype": "bfloat16", "max_model_len": 960}
    with measuring_engine(tmp_path, write_gated_delta, store, **sizes) as engine:
        measuring = Measuring(engine)
        # vLLM chooses the tokens between two states by the machine's processor.
        said = re.search(
            r"every (\d+)th token only; ask for contexts of (\d+) tokens or more",
            measuring.end(order_of()),
        )
        step, least = map(int, said.groups())
        assert least == 4 * step, "four sleeps judge a state"
        too_short = order_of(contexts=(least - 1,))
        assert f"contexts of {least} tokens or more" in measuring.end(too_short)
        rows = {x.preset: x for x in measuring.report(contexts=(900,)).rows}
        measuring.close()
    assert rows["raw"].kl < 1e-6 < rows["tq4+state8"].kl
    assert rows["raw"].context == 900 // step * step, "what follows is not packed"
    assert 16 < rows["raw"].bits_per_element < 20, "bf16, and states in float32"
    assert rows["tq4+state8"].bits_per_element < 6


@pytest.mark.thorough
def test_a_packed_matrix_comes_back(tmp_path, sessions):
    store = StoreConfig(codec="tq4", accept_loss=True, ram_bytes=1 << 28, disk_bytes=0)
    sizes = {"dtype": "bfloat16", "max_model_len": 960}
    with opened(tmp_path, write_gated_delta, store, **sizes) as engine:
        assert "state8" in engine.report().codec.id
        first = engine.ask(sessions[0][:NUM_TOKENS], "asleep", tokens=8)
        engine.wait_saved("asleep")
        (tier,) = [x for x in engine.report().tiers if x.name == "ram"]
        block_tokens = engine.engine.vllm_config.cache_config.block_size
        saved = NUM_TOKENS // block_tokens * block_tokens
        # These tokens in bf16, and two matrices of each of two layers in float32.
        live = saved * 2 * 2 * 2 * HEAD_DIM * 2 + 2 * 4 * HEAD_DIM * HEAD_DIM * 4
        assert tier.nbytes < live / 2
        assert engine.forget_local()
        again = engine.ask(sessions[0][:NUM_TOKENS], "asleep", tokens=8)
        assert again.restored == saved > 0 and len(again.tokens) == len(first.tokens)
