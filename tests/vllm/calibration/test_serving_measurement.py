"""A vLLM measures its own model while it serves: by its requests, on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.calibration.gate.profiles import profile_path
from engines.wire import CodecReport
from kvstore.codecs.profile import Profile, load_profile
from kvstore.config import StoreConfig
from tests.vllm.rig.engine import RealEngine
from tests.vllm.rig.measuring_front import MeasuringFront, measuring_engine
from tests.vllm.rig.tiny_model import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(
    params=[1, pytest.param(2, marks=pytest.mark.thorough)], ids=["one rank", "two ranks"]
)
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RealEngine]:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be one core for both
    store = StoreConfig(codec="auto", ram_bytes=1 << 28, disk_bytes=1 << 28)
    short = {"max_model_len": 400}  # a quick measurement: of 256 tokens
    ranks = {"tensor_parallel_size": request.param}
    with measuring_engine(tmp_path, write_tiny_model, store, **ranks, **short) as engine:
        yield engine


def codec_of(engine: RealEngine) -> CodecReport:
    report = engine.report().codec
    assert report is not None
    return report


def profiles(engine: RealEngine) -> list[Profile]:
    folder = profile_path(Path(engine.settings.disk_path), "x").parent
    return [load_profile(x) for x in folder.glob("*.tcpf")]


def test_it_ends_measured_without_a_restart(engine, sessions, pytestconfig):
    num_ranks = engine.engine.vllm_config.parallel_config.world_size
    assert codec_of(engine).unmeasured
    front = MeasuringFront(engine)
    front.run_until(lambda: not codec_of(engine).unmeasured)
    measured = profiles(engine)
    assert len(measured) == num_ranks
    figures = [[(x.preset, x.kl, x.top1, x.bits_per_element) for x in p.rows] for p in measured]
    assert figures[0] == figures[-1], "the ranks have one verdict"
    kls = {x.preset: x.kl for x in measured[0].rows}
    assert kls["dense3"] > 1e-5, "a codec's loss is seen"
    if num_ranks == 1 and pytestconfig.getoption("--thorough"):
        front.run_until(lambda: "max" in {x.preset for x in profiles(engine)[0].rows})
    front.close()
    # It serves as before.
    first = engine.ask(sessions[0][:300], "after", tokens=8)
    engine.wait_saved("after")
    assert engine.forget_local()
    assert engine.ask(sessions[0][:300], "after", tokens=8).restored > 0
    assert first.tokens
