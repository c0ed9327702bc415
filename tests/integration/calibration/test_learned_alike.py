"""Two engines of one model learn the same, to the bit, and serve requests meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engines.calibration.calibrate import calibrate
from engines.calibration.corpus import Text
from engines.calibration.learn import TextReader, deal
from engines.calibration.scratch import Scratch
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.measuring.instrument import MlxInstrument
from engines.mlx_worker.model.loading import load_model
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.profile import Profile
from tests.integration.calibration.surveys import small_order
from tests.integration.mlx_owner.harness import Engine, engine, session, text
from tests.integration.tiny_models import write_model

pytestmark = pytest.mark.mlx

TEXTS = [Text(str(x), "." * x) for x in (1, 2, 3)]
PRESETS = ["dense3"]


class Instrument(MlxInstrument):
    """Has no tokenizer, as tiny models have none: a text is as long as its number."""

    def encode(self, text_: str) -> list[int]:
        return text(len(text_), 192)


class Late:
    """Holds each step up for a while that differs from step to step."""

    def __init__(self) -> None:
        self.num_steps = 0

    def __call__(self) -> None:
        self.num_steps += 1
        time.sleep(0.002 * (self.num_steps % 5))


def learned(it: Engine, folder: Path, late: Callable[[], None] = lambda: None) -> dict[str, str]:
    owner = it.owner
    assert owner.held is not None and owner.codecs is not None

    class Steps:
        waited_s = 0.0

        def run(self, step):  # type: ignore[no-untyped-def]
            late()
            return owner.idle_steps.run(step)

    known = owner.codecs.report.fingerprint
    beside = Instrument(owner.loaded, owner.plan, None, Steps(), owner.held, 64)
    with Scratch(folder) as scratch:
        samples = TextReader(beside, scratch=scratch).samples([*deal(TEXTS, beside.encode, 3, 192)])
        assert samples.metrics is not None, "nothing was observed"
        return learn_profile(samples, known, PRESETS).ids


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3_text", marks=pytest.mark.thorough)])
async def test_delays_drops_and_users_change_nothing(kind: str, tmp_path: Path) -> None:
    async with engine(kind, tmp_path / "one", codec="auto", gate={}) as it:
        quiet = await asyncio.to_thread(learned, it, tmp_path)
    other = {"prefill_step": 32, "max_batch": 3}
    async with engine(kind, tmp_path / "two", codec="auto", gate={}, **other) as it:
        owner, late = it.owner, Late()
        held = owner.held
        assert held is not None
        running = asyncio.create_task(asyncio.to_thread(learned, it, tmp_path, late))
        for number in range(4):
            await it.turn(text(10 + number, 40 + number), session(str(number)), max_tokens=2)
            await owner.call(held.drop)  # as for a request that needs its memory
            before = owner.idle_steps.num_done
            while owner.idle_steps.num_done < before + 3:
                await asyncio.sleep(0.001)
        assert not running.done()
        busy = await running
        assert late.num_steps > 20
    assert set(quiet) == set(PRESETS)
    assert busy == quiet


def test_what_is_learned_while_another_is_measured_is_the_same(tmp_path, monkeypatch):
    """An order whose report a command awaits learns the next preset meanwhile."""
    write_model("llama", tmp_path)
    loaded = load_model(str(tmp_path), "float32")
    order = small_order("dense3", "balanced", "tq4")
    found, beside = [], []

    def noted(samples: Samples, fingerprint: str, presets: list[str]) -> Profile:
        if threading.current_thread() is not threading.main_thread():
            beside.extend(presets)
        return learn_profile(samples, fingerprint, presets)

    monkeypatch.setattr("engines.calibration.calibrate.learn_profile", noted)
    for path in ("", str(tmp_path / "report.json")):
        instrument = MlxInstrument(loaded, probe(loaded.model), tmp_path)
        profile = calibrate(instrument, msgspec.structs.replace(order, report_path=path))
        rows = [(x.preset, x.kl, x.bits_per_element) for x in profile.rows]
        found.append((profile.ids, sorted(rows)))
    assert found[0] == found[1] and beside == ["balanced"]
    assert found[0][0].keys() == {"dense3", "balanced"} and len(found[0][1]) == 3
