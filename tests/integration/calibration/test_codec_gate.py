"""The gate on the real engine: a codec serves once it was measured, and is adopted on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from engines.calibration.gate.profiles import save
from engines.calibration.measuring.cases import Case
from engines.calibration.measuring.measure import Judge
from engines.mlx_worker.cache.layout import CannotServe
from engines.wire import CodecReport
from kvstore.blobs.chain import CHUNK, STATE, WINDOW
from kvstore.blobs.format import codec_in
from kvstore.blobs.packer import PACKED_STATE
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.session_codec import open_session_codec
from tests.integration.calibration.surveys import instrument_of
from tests.integration.mlx_owner.harness import Engine, engine, session, text

pytestmark = pytest.mark.mlx

ONE, TWO = session("one"), session("two")


def calibrate_whole(data: Path, kind: str) -> tuple[Quality, ...]:
    """Measure presets of whole sessions of a model with states; returns the rows."""
    instrument = instrument_of(kind)
    assert instrument.states is not None
    codecs = {name: open_session_codec(name, None, instrument.states) for name in WHOLE[kind]}
    case = Case("text", tuple(text(1, 256)), tuple(text(2, 40)))
    # Of a random model hardly any guess stays the same; here it is about KL.
    found = Judge(instrument, [case]).rows(codecs)
    rows = tuple(msgspec.structs.replace(x, top1=1.0) for x in found)
    save(Profile(instrument.fingerprint, instrument.layout, (), {}, rows), data)
    return rows


def calibrate(data: Path, *presets: str, shares: Mapping[str, float] | None = None) -> None:
    """A real profile of the tiny model, learned and measured.

    ``shares``: the time of a restore over that of a prefill, by preset, on a machine of the test's
    choice; all presets then keep the bound.
    """
    instrument = instrument_of("llama")
    windows = [instrument.prefill(text(100 + i, 256)).run for i in range(3)]
    learnable = [x for x in presets if x in ("dense3", "max")]
    samples = Samples(instrument.layout, instrument.ropes, windows)
    profile = learn_profile(samples, instrument.fingerprint, learnable)
    codecs = {name: open_codec(name, profile) for name in presets}
    cases = [Case("text", tuple(text(7, 256)), tuple(text(8, 256)))]
    rows = Judge(instrument, cases).rows(codecs)
    if shares is not None:
        good = {"kl": 0.001, "top1": 1.0, "prefill_s": 1.0}
        rows = [msgspec.structs.replace(x, restore_s=shares[x.preset], **good) for x in rows]
    save(dataclasses.replace(profile, rows=tuple(rows)), data)


async def report_of(it: Engine) -> CodecReport:
    report = (await it.verbs.stats()).codec
    assert report is not None
    return report


async def packed_bytes(it: Engine, name: str) -> int:
    (report,) = [x for x in await it.verbs.sessions() if x.id == name]
    return report.cold_bytes


async def test_a_profile_is_adopted_while_sessions_live(tmp_path: Path) -> None:
    async with engine("llama", tmp_path, codec="auto", gate={}) as it:
        assert await report_of(it) == await it.verbs.adopt()
        before = await report_of(it)
        assert (before.name, before.unmeasured) == ("raw", True)
        first = await it.turn(text(1, 300), ONE)
        await it.settled()
        calibrate(tmp_path, "dense3", "tq4")
        after = await it.verbs.adopt()
        # On random weights either may be the one that keeps the bound.
        assert after.name in ("dense3", "tq4") and not after.unmeasured, after
        assert after.rows[0].codec_id == after.id and after.rows[0].kl <= 0.01
        assert await report_of(it) == after
        await it.asleep_after(text(2, 300), TWO)
        assert await packed_bytes(it, "two") < 0.5 * await packed_bytes(it, "one")
        for ref, start in ((ONE, 1), (TWO, 2)):
            again = await it.turn(text(start, 300), ref)
            assert again.cache is not None and again.cache.source == "cold-ram", again.cache
            assert again.cache.cached_tokens == 288
            if ref is ONE:
                assert again.tokens == first.tokens
        await it.settled()
    async with engine("llama", tmp_path, codec="auto", gate={}) as it:
        assert (await report_of(it)).id == after.id
        for ref, start in ((ONE, 1), (TWO, 2)):
            again = await it.turn(text(start, 300), ref)
            assert again.cache is not None and again.cache.source == "cold-disk", again.cache


def codecs_in(it: Engine, tier: int) -> set[str]:
    return {codec_in(x).decode().split(".")[0] for _, x in it.tiers[tier].scan(CHUNK)}


async def test_one_codec_packs_for_all_tiers_and_nothing_is_packed_again(tmp_path: Path) -> None:
    calibrate(tmp_path, "tq4", "dense3", shares={"tq4": 0.05, "dense3": 0.4})
    async with engine("llama", tmp_path, codec="auto", gate={}) as it:
        report = await report_of(it)
        assert report.name == "tq4" and "dense3 would take 40.0%" in report.why
        await it.turn(text(1, 300), ONE)
        await it.settled()
        assert codecs_in(it, 0) == codecs_in(it, 1) == {"tq4"}
        await it.demote_all()
        for _ in range(2):  # asleep and awake again and again: the same bytes
            before = [sorted(it.tiers[x].scan(CHUNK)) for x in (0, 1)]
            assert before[0] == before[1]
            again = await it.turn(text(1, 300), ONE)
            assert again.cache is not None and again.cache.source == "cold-ram", again.cache
            await it.settled()
            await it.demote_all()
            assert [sorted(it.tiers[x].scan(CHUNK)) for x in (0, 1)] == before
    calibrate(tmp_path, "tq4", "dense3", shares={"tq4": 0.4, "dense3": 0.05})
    async with engine("llama", tmp_path, codec="auto", gate={}) as it:
        assert (await report_of(it)).name == "dense3"
        again = await it.turn(text(1, 300), ONE)
        assert again.cache is not None and again.cache.source == "cold-disk", again.cache
        assert again.cache.cached_tokens == 288
        await it.settled()
        assert codecs_in(it, 0) == {"tq4"}  # as it is: a copy of a copy would lose twice


async def test_a_named_codec_out_of_bounds_ends_the_start(tmp_path: Path) -> None:
    calibrate(tmp_path, "tq3")
    with pytest.raises(CannotServe, match=r"codec tq3 at 256 tokens has a KL of .* bound of 0"):
        async with engine("llama", tmp_path, codec="tq3", gate={"max_kl": 0.0}):
            pass
    async with engine("llama", tmp_path, codec="tq3", gate={}) as it:
        assert (await report_of(it)).name == "tq3"


# Of models with states: presets to measure, and the least dense.
WHOLE = {
    "gemma3_text": ("tq4", "tq3"),
    "qwen3_next": ("tq4+state8", "tq4+state4"),
    "mamba2": ("raw+state8", "raw+state4"),
}


USUAL = "qwen3_next"  # it has states and rows


@pytest.mark.parametrize(
    "kind",
    [x if x == USUAL else pytest.param(x, marks=pytest.mark.thorough) for x in WHOLE],
)
async def test_a_model_with_states_is_judged_by_whole_sessions(kind: str, tmp_path: Path) -> None:
    async with engine(kind, tmp_path, codec="auto", gate={}) as it:
        report = await report_of(it)
        assert (report.name, report.unmeasured) == ("raw", True)
    rows = {x.preset: x for x in calibrate_whole(tmp_path, kind)}
    good, bad = WHOLE[kind]
    between = {"max_kl": (rows[good].kl + rows[bad].kl) / 2}
    async with engine(kind, tmp_path, codec="auto", gate=between) as it:
        report = await report_of(it)
        assert report.name == good, report.why
        assert report.id == rows[good].codec_id
        assert f"codec {bad} at 256 tokens has a KL" in report.why
        await it.turn(text(1, 300), ONE)
        await it.settled()
        if kind == "gemma3_text":
            windows = {codec_in(x).decode() for _, x in it.tiers[0].scan(WINDOW)}
            assert windows == {"tq4.2"}
        else:
            assert {codec_in(x) for _, x in it.tiers[0].scan(STATE)} == {PACKED_STATE}
    with pytest.raises(CannotServe, match="above the bound"):
        async with engine(kind, tmp_path, codec=bad, gate=between):
            pass
