"""The whole engine with a live cache that is kept packed (``engine.hot_codec``)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models import afm7
from mlx_lm.models.cache import KVCache

from engines.calibration.calibrate import calibrate
from engines.calibration.gate.profiles import save
from engines.config import EngineConfig
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches, CannotServe, probe
from engines.mlx_worker.cache.packed_model import with_packed_caches
from engines.mlx_worker.measuring.instrument import MlxInstrument
from engines.mlx_worker.model.loading import load_model
from engines.mlx_worker.sessions.store_opening import store_opener
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.packed_codec import packed_codec
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import StoreConfig
from kvstore.shapes import KVPair
from tests.integration.calibration.surveys import small_order
from tests.integration.mlx_owner.harness import Engine, engine, session, text
from tests.integration.tiny_models import tiny_model, write_model

pytestmark = pytest.mark.mlx

# Chunks of prompts always end at the same places, or what they see packed would differ by chance.
STEP = 32
LONG = text(1, 300)
WHOLE = 288  # tokens of its full chunks


def hot_caches(it: Engine, name: str) -> Caches:
    hot = it.owner.batching.hot_cache.sessions.get(("tenant", name))
    return hot.caches


FAINT = 5  # a token; ``text`` has none of it
WITH_FAINT = [*LONG[:100], FAINT, *LONG[100:270], FAINT, *LONG[270:]]


@pytest.mark.parametrize("codec", ["tq3", "tq4"])
@pytest.mark.parametrize("prompt", [LONG, WITH_FAINT], ids=["plain", "with-rows-kept-exactly"])
async def test_a_session_that_sleeps_again_and_again_keeps_its_bytes_and_its_next_tokens(
    tmp_path, codec, prompt
):
    """Some rows are packed live, others at the first sleep; those of a faint token are too small
    for a scale, and are kept as they are."""
    async with engine("llama", tmp_path, codec=codec, hot_codec=codec, prefill_step=STEP) as it:
        await it.owner.call(lambda: make_faint(it))
        await it.turn(prompt, session("a"), max_tokens=1)
        await it.settled()
        stored, answers = [payload(it, codec)], []
        for _ in range(4):
            await it.demote_all()
            answer = await it.turn([*prompt, 7], session("a"), max_tokens=8)
            assert answer.cache is not None
            assert (answer.cache.source, answer.cache.cached_tokens) == ("cold-ram", WHOLE)
            answers.append(answer.tokens)
            await it.settled()
            stored.append(payload(it, codec))
            kept = sum(side.num_kept for x in hot_caches(it, "a") for side in x.sides)
            assert kept == (2 * 2 * 2 if prompt is WITH_FAINT else 0)  # tokens, heads, K and V
    assert [x == stored[0] for x in stored] == [True] * 5
    assert [x == answers[0] for x in answers] == [True] * 4


def payload(it: Engine, codec: str) -> bytes:
    """Pack the full chunks of a hot session, as it goes to sleep with them."""
    assert it.owner.plan is not None and isinstance(it.owner.plan.layout, PackedLayout)
    layout = it.owner.plan.layout
    run = kv_arrays.growing_run(hot_caches(it, "a"), WHOLE)
    return bytes(packed_codec(codec_by_name(codec), layout).encode(run, layout, 0))


def make_faint(it: Engine) -> None:
    """Make the embedding of a token so small that K and V of the first layer nearly vanish."""
    embedding = it.owner.loaded.model.model.model.embed_tokens
    embedding.weight[FAINT] *= 1e-8


async def test_the_store_holds_what_encoding_once_gives(tmp_path):
    """The payload of a chunk is the codec's own of the KV as it was computed."""
    async with engine("llama", tmp_path, codec="tq3", hot_codec="tq3", prefill_step=512) as it:
        await it.turn(LONG, session("a"), max_tokens=1)  # its first 128 tokens are fed at once
        await it.settled()
        exact = await it.owner.call(lambda: computed(it, LONG[:128]))
        match, _ = it.store.prepare(session("a"))
        restored = it.store.restore(match)
    codec, layout = codec_by_name("tq3"), probe(tiny_model("llama").model).layout
    right = layout.empty(128)
    codec.decode(memoryview(codec.encode(exact, layout, 0)), layout, 0, right)
    for pair, expected in zip(restored.run, right, strict=True):
        for array, values in zip(pair, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(array[:, :128]), values)


def computed(it: Engine, tokens: list[int]) -> list[KVPair]:
    """KV of a prompt as attention computes it, with no loss yet, (heads, tokens, dim)."""
    model = it.owner.loaded.model
    caches = model.make_cache()
    model(mx.array([tokens]), caches)
    sides = [[mx.concatenate([s.sinks, s.recent], axis=2) for s in x.sides] for x in caches]
    mx.eval(sides)
    return [cast(KVPair, tuple(np.array(s[0].astype(mx.float32)) for s in x)) for x in sides]


async def test_many_at_once_say_what_each_says_alone(tmp_path):
    prompts = [text(i, length) for i, length in enumerate((290, 20, 150, 77))]
    async with engine("llama", tmp_path, codec="tq3", hot_codec="tq3", prefill_step=STEP) as it:
        alone = [(await it.turn(prompt, max_tokens=12)).tokens for prompt in prompts]
        together = await asyncio.gather(*(it.turn(prompt, max_tokens=12) for prompt in prompts))
    assert [answer.tokens for answer in together] == alone


async def test_a_shared_beginning_is_copied_hot_and_stays_packed(tmp_path):
    async with engine("llama", tmp_path, codec="tq3", hot_codec="tq3", prefill_step=STEP) as it:
        await it.turn([*LONG, *text(5, 20)], session("one"))
        await it.settled()
        other = await it.turn([*LONG, *text(6, 20)], session("two"))
        assert (other.cache.source, other.cache.cached_tokens) == ("hot", 300)
        fresh = await it.turn([*LONG, *text(6, 20)], None)
        assert fresh.tokens == other.tokens


async def test_more_sessions_stay_hot_in_the_same_budget(tmp_path):
    async def still_hot(hot_codec: str) -> int:
        async with engine(
            "llama",
            tmp_path / f"x{hot_codec}",
            codec="tq3",
            hot_codec=hot_codec,
            hot_bytes=5800 << 10,
        ) as it:
            for i in range(6):
                await it.turn(text(i, 500), session(str(i)), max_tokens=1)
                await it.settled()
            return sum(report.hot for report in it.reports.sessions())

    assert await still_hot("tq3") >= 4 * await still_hot("")


async def test_the_bytes_that_are_counted_are_the_bytes_that_are_taken(tmp_path):
    async with engine("llama", tmp_path, codec="tq3", hot_codec="tq3") as it:
        before = await it.owner.call(mx.get_active_memory)
        for i in range(3):
            await it.turn(text(i, 700), session(str(i)))
            await it.settled()
        taken = await it.owner.call(mx.get_active_memory) - before
        counted = it.owner.batching.hot_cache.sessions.nbytes
    assert counted < 3 * 700 * 3 * 2 * 2 * 64 * 4 / 5  # of the same in fp32
    assert taken == pytest.approx(counted, rel=0.1)


def test_what_packing_costs_a_model_stays_within_the_codecs_own_figure():
    """KL of the next tokens, read from a cache that is packed live, against the exact one; beside
    it the KL of the same codec used cold: the whole prefix encoded and decoded once."""
    loaded = tiny_model("llama")
    plan = probe(loaded.model)
    live, live_plan = with_packed_caches(loaded.model, plan, EngineConfig(hot_codec="tq3"))
    assert live_plan.kv_sizes()[1] == plan.kv_sizes()[1], "packed or not, in bf16 it is the same"
    prefix, rest = text(3, 400), text(4, 40)
    exact, packed = [KVCache() for _ in loaded.model.layers], live.make_cache()
    for caches in (exact, packed):
        for at in range(0, len(prefix), STEP):
            loaded.model(mx.array([prefix[at : at + STEP]]), cache=caches)
            mx.eval([cache.state for cache in caches])
    assert plan.layout is not None
    codec, run = codec_by_name("tq3"), kv_arrays.growing_run(exact, len(prefix))
    decoded = plan.layout.empty(len(prefix))
    codec.decode(memoryview(codec.encode(run, plan.layout, 0)), plan.layout, 0, decoded)
    cold = kv_arrays.rebuild(loaded.model, plan.layout, decoded, None, len(prefix))
    right, live_kl, cold_kl = (
        loaded.model(mx.array([rest]), cache=caches)[0] for caches in (exact, packed, cold)
    )
    assert 0 < divergence(right, live_kl) <= 1.5 * divergence(right, cold_kl)


def divergence(right: mx.array, other: mx.array) -> float:
    """Mean KL of next-token distributions, (positions, vocab) logits each."""
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (right, other))
    return float((mx.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean().item())


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "mamba2"])
def test_models_with_other_caches_are_refused_in_a_sentence(kind):
    loaded = tiny_model(kind)
    with pytest.raises(CannotServe, match="only plain KV caches can be kept packed"):
        with_packed_caches(loaded.model, probe(loaded.model), EngineConfig(hot_codec="tq3"))


def test_a_model_that_asks_caches_for_more_is_refused_in_a_sentence():
    args = afm7.ModelArgs(
        model_type="afm7",
        vocab_size=200,
        hidden_dim=128,
        num_layers=4,
        num_kv_reuse_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim_scale_factor=2.0,
        rope_theta=1e4,
    )
    model = afm7.Model(args)
    with pytest.raises(CannotServe, match="this model cannot use packed caches"):
        with_packed_caches(model, probe(model), EngineConfig(hot_codec="tq3"))


async def test_another_cold_codec_costs_hibernation_and_says_why(tmp_path):
    async with engine("llama", tmp_path, codec="raw", hot_codec="tq3") as it:
        assert not it.owner.facts.hibernation
        assert "can only be kept cold by tq3" in it.owner.facts.hibernation_reason
        assert (await it.turn(text(1, 20))).finished


async def test_packed_and_plain_engines_do_not_share_cold_sessions(tmp_path):
    """KV that a packed cache computes carries its loss on; it is not passed off as exact."""
    async with engine("llama", tmp_path, codec="tq3", hot_codec="tq3") as it:
        await it.turn(LONG, session("a"))
        await it.settled()
    async with engine("llama", tmp_path, codec="tq3") as it:
        answer = await it.turn([*LONG, 5], session("a"))
        assert answer.cache.source == "miss"


def test_what_was_measured_with_a_plain_live_cache_counts_for_a_packed_one(tmp_path):
    """``thermocline calibrate`` measures so; its figures decide whether ``hot_codec`` may serve."""
    write_model("llama", tmp_path)
    loaded = load_model(str(tmp_path), "float32")
    plan = probe(loaded.model)
    order = small_order("tq4", num_scored=8, data_path=str(tmp_path))
    profile = calibrate(MlxInstrument(loaded, plan, tmp_path), order)
    save(profile, tmp_path)
    live, packed = with_packed_caches(loaded.model, plan, EngineConfig(hot_codec="tq4"))
    served = replace(loaded, model=live)
    config = StoreConfig(disk_path=str(tmp_path), ram_bytes=1 << 24, disk_bytes=0)
    strict = msgspec.structs.replace(config, max_kl=profile.rows[0].kl / 2)
    with pytest.raises(CannotServe, match="above the bound"):
        store_opener(strict, "tiny")(served, packed)
    with pytest.raises(CannotServe, match="was not measured"):
        store_opener(config, "tiny", str(tmp_path / "elsewhere"))(served, packed)
