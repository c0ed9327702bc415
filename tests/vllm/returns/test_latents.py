"""Latent attention (MLA) on a real engine: latents and rotary keys sleep and come back.

On most CPUs vLLM turns its prefix cache off for such models, since it cannot prefill after a
cached prefix there. One token after it is a decode step, which it can do: so these prompts end
right after a block, and the prefix cache is turned on again for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.config import StoreConfig
from tests.vllm.rig.engine import RealEngine, Result, opened
from tests.vllm.rig.tiny_families import write_latents

pytestmark = pytest.mark.vllm

BLOCK = 16  # the CPU's kernel takes no other
WHOLE = 20 * BLOCK
PROMPT = [(i * 37 + 11) % 900 + 3 for i in range(WHOLE + 1)]


def reuse_prefixes(config: Any) -> None:
    config.cache_config.enable_prefix_caching = True


@pytest.fixture(scope="module", params=["raw", pytest.param("tq4", marks=pytest.mark.thorough)])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    store = StoreConfig(codec=request.param, accept_loss=True, ram_bytes=1 << 30, disk_bytes=0)
    sizes = {"block_size": BLOCK, "num_gpu_blocks_override": 60, "max_model_len": 512}
    options: dict[str, Any] = {"prepare": reuse_prefixes, "attention_backend": "CPU_MLA", **sizes}
    with opened(tmp_path_factory.mktemp("latents"), write_latents, store, **options) as engine:
        yield engine


def furthest(a: Result, b: Result) -> float:
    """The largest difference between the log-probabilities of the first tokens that both chose."""
    same = np.cumprod([x == y for x, y in zip(a.tokens, b.tokens, strict=True)]).sum()
    assert same > 0
    return float(np.abs(np.subtract(a.logprobs[:same], b.logprobs[:same])).max())


def test_what_slept_goes_on_as_vllms_own_prefix_does(engine):
    engine.ask(PROMPT, "one", tokens=6)
    own = engine.ask(PROMPT, tokens=6)
    assert (own.cached, own.restored) == (WHOLE, 0)
    kept = engine.wait_saved("one")
    assert engine.forget_local()
    back = engine.ask(PROMPT, "one", tokens=6)
    assert (back.cached, back.restored, back.tier) == (WHOLE, WHOLE, "ram")
    if engine.settings.store.codec == "raw":
        assert (back.tokens, back.logprobs) == (own.tokens, own.logprobs)
    else:
        assert furthest(back, own) < 0.5
        assert kept.cold_bytes < 2 * WHOLE * 576 * 4 / 5
