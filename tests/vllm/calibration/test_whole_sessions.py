"""A vLLM measures models with windows or recurrent states: sessions as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.calibration.gate.profiles import profile_path
from kvstore.codecs.profile import load_profile
from kvstore.config import StoreConfig
from tests.vllm.rig.engine import BLOCK, RealEngine
from tests.vllm.rig.measuring_front import MeasuringFront, measuring_engine
from tests.vllm.rig.tiny_hybrids import write_gated_delta, write_recurrent, write_windowed
from tests.vllm.rig.tiny_model import HEAD_DIM

NUM_TOKENS = 300
pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(600)]

# A quick measurement: of 128 tokens. Matrices are measured with blocks as large as those that vLLM
# chooses for published models; four are needed.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "windowed": (write_windowed, {"max_model_len": 340}),
    "convolutions": (write_recurrent, {"mamba_block_size": BLOCK, "max_model_len": 340}),
    "matrices": (
        write_gated_delta,
        {"dtype": "bfloat16", "max_model_len": 2800, "block_size": 528},
    ),
}


@pytest.fixture(params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealEngine]:
    write, options = MODELS[request.param]
    bytes = {"ram_bytes": 1 << 28, "disk_bytes": 1 << 28}
    store = StoreConfig(codec="auto", calibrate=True, learn_on=False, **bytes)
    with measuring_engine(tmp_path, write, store, **options) as engine:
        yield engine


def test_a_session_is_measured_whole(engine, sessions, capfd):
    assert engine.report().codec.unmeasured
    front = MeasuringFront(engine)
    front.run_until(lambda: not engine.report().codec.unmeasured)
    assert "count alike" not in capfd.readouterr().err, "which errors matter was seen"
    folder = profile_path(Path(engine.settings.disk_path), "x").parent
    (profile,) = [load_profile(x) for x in folder.glob("*.tcpf")]
    kls = {x.preset: x.kl for x in profile.rows}
    packed = next(x for x in kls if x.startswith("dense3"))
    assert kls[packed] > 1e-5, "a codec's loss is seen"
    front.close()
    block_tokens = engine.engine.vllm_config.cache_config.block_size
    prompt = sessions[0][: max(NUM_TOKENS, block_tokens + 1)]
    first = engine.ask(prompt, "after", tokens=8)
    engine.wait_saved("after")
    assert engine.forget_local()
    again = engine.ask(prompt, "after", tokens=8)
    assert again.restored == len(prompt) // block_tokens * block_tokens > 0  # a block is a chunk
    # Which preset restores in time is a matter of this machine.
    if engine.report().codec.id.startswith("raw"):
        assert again.tokens == first.tokens
    assert ("+state" in packed) == (block_tokens > BLOCK), "matrices are packed, too"


def test_a_packed_matrix_comes_back(tmp_path, sessions):
    (tmp_path / "model").mkdir()
    (tmp_path / "vllm").mkdir()
    write_gated_delta(tmp_path / "model")
    store = StoreConfig(codec="tq4", accept_loss=True, ram_bytes=1 << 28, disk_bytes=0)
    engine = RealEngine(
        str(tmp_path / "model"),
        tmp_path / "vllm",
        store,
        dtype="bfloat16",
        max_model_len=960,
        skip_tokenizer_init=True,
    )
    try:
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
    finally:
        engine.close()
