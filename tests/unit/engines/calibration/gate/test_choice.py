"""Which codec serves a model, by the model's measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.stacks.constants import configured
from engines.calibration.gate.choice import Choice, choose
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.shapes import KVLayer, KVLayout
from tests.qualities import GOOD
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile

LAYOUT = model_layout()
Rows = tuple[dict[str, Any], ...] | None
# Of a prefill, that a restore takes.
SHARES = {"dense3": 0.04, "balanced": 0.09, "max": 0.2, "tq4": 0.3, "safe": 0.3}
BITS = {"max": 1.0, "balanced": 2.1, "dense3": 3.2, "tq3": 3.25, "tq4": 4.25, "safe": 6.0}


def row(preset: str, **changes: object) -> Quality:
    codec_id = open_codec(preset, model_profile()).id
    known = {"preset": preset, "codec_id": codec_id, "bits_per_element": BITS.get(preset, 3.0)}
    known |= {"prefill_s": 1.0, "restore_s": SHARES.get(preset, 0.04)}
    return msgspec.structs.replace(GOOD, **{**known, **changes})


def measured(*rows: Quality) -> Profile:
    return dataclasses.replace(model_profile(), rows=rows)


def chosen(profile: Profile | None, codec: str = "auto", unmeasurable: str = "", **config: object):
    return choose(codec, StoreConfig(**config), LAYOUT, profile, unmeasurable)


def test_auto_takes_three_bits_where_denser_ones_are_slow():
    choice = chosen(measured(row("dense3"), row("max"), row("tq4")))
    assert (choice.name, choice.unmeasured) == ("dense3", False)
    assert choice.codec.id == open_codec("dense3", model_profile()).id
    assert "KL 0.0050 at 2048 tokens, 3.20 bits" in choice.why
    assert choice.rows == (row("dense3"),)


def test_a_row_without_chains_says_that_they_are_missing():
    old = chosen(measured(row("dense3")))
    assert old.name == "dense3" and "not measured on reasoning chains" in old.why
    assert "thermocline calibrate" in old.why
    chains = {"chain_tokens": 80, "chain_kl": 0.01, "chain_top1": 0.98}
    new = chosen(measured(row("dense3", **chains)))
    assert "0.0050 at 2048 tokens (of chains 0.0100), 3.20 bits" in new.why
    assert "reasoning chains" not in new.why


def timed(preset: str, share: float, **changes: object) -> Quality:
    """A row whose restore takes that share of a prefill."""
    return row(preset, prefill_s=1.0, restore_s=share, **changes)


def all_timed() -> tuple[Quality, ...]:
    """Rows of all presets, of a profile that takes seconds to learn."""
    return tuple(timed(preset, share) for preset, share in SHARES.items())


QUICK = [
    ({}, "balanced"),
    ({"restore_share": 0.05}, "dense3"),
    ({"restore_share": 0.2}, "max"),
    ({"codec": "safe"}, "safe"),
    ({"max_kl": 0.001}, "raw"),
]


@pytest.mark.parametrize(("settings", "wanted"), QUICK)
def test_one_codec_serves_that_restores_quickly(settings: dict[str, Any], wanted: str):
    config = configured(StoreConfig, **settings)
    choice = choose(config.codec, config, LAYOUT, measured(*all_timed()))
    assert (choice.name, choice.unmeasured) == (wanted, False)


def test_denser_codecs_that_are_out_of_bounds_are_named():
    rows = (timed("dense3", 0.04, kl=0.02), timed("max", 0.2, kl=0.03), timed("balanced", 0.3))
    choice = chosen(measured(*rows, timed("safe", 0.04)))
    assert choice.name == "safe"
    assert "max at 2048 tokens has a KL of 0.0300" in choice.why
    assert "dense3 at 2048 tokens has a KL of 0.0200" in choice.why
    assert "balanced would take 30.0%" in choice.why


def test_else_an_exact_one():
    choice = chosen(measured(row("dense3", kl=0.02), row("tq4", kl=0.02), row("safe", kl=0.02)))
    assert (choice.name, choice.codec.exact, choice.unmeasured) == ("raw", True, False)
    assert "KL of 0.0200" in choice.why


def test_a_stricter_bound_has_the_fallbacks_measured():
    choice = chosen(measured(row("dense3", kl=0.004), row("balanced", kl=0.004)), max_kl=0.002)
    assert (choice.name, choice.unmeasured) == ("raw", True)


def test_the_bound_is_the_operators():
    assert chosen(measured(row("dense3", kl=0.02)), max_kl=0.03).name == "dense3"
    assert chosen(measured(row("dense3")), max_kl=0.001).name == "raw"


def profile_of(preset: str, rows: Rows) -> Profile | None:
    """A profile with these rows of ``preset``, as changes to a good one; None: no profile.

    Not a parameter of the tests: learning takes seconds, and pytest evaluates parameters whenever
    it collects.
    """
    return None if rows is None else measured(*(row(preset, **changes) for changes in rows))


LEARNED_ANEW = {"codec_id": "dense3.2-0123456789"}


@pytest.mark.parametrize("rows", [None, (), (LEARNED_ANEW,), ({"codec_id": ""},)])
def test_nothing_is_lost_before_it_was_measured(rows: Rows):
    profile = profile_of("dense3", rows)
    choice = chosen(profile)
    assert (choice.name, choice.unmeasured) == ("raw", True)
    assert "not measured" in choice.why


def test_a_codec_that_another_release_learned_is_measured_again():
    known = model_profile().learned
    learned = {**known, "dense3": {"other": known["max"]["means"]}}
    profile = dataclasses.replace(measured(row("dense3"), row("tq4")), learned=learned)
    choice = chosen(profile)
    assert (choice.name, choice.unmeasured) == ("tq4", True)


def test_methods_of_the_literature_have_to_be_named():
    profile = measured(row("dense3", kl=1), row("manthan", codec_id="manthan.1"))
    assert chosen(profile).name == "raw"
    assert chosen(profile, "manthan").name == "manthan"


def test_a_named_codec_out_of_bounds_is_refused_with_the_numbers():
    profile = measured(row("tq3", kl=0.0289), row("tq4"))
    with pytest.raises(CodecRefused, match=r"tq3 at 2048 .* KL of 0\.0289, above .* 0\.01; .*loss"):
        chosen(profile, "tq3")
    accepted = chosen(profile, "tq3", accept_loss=True)
    assert accepted.name == "tq3" and "was accepted" in accepted.why and "0.0289" in accepted.why
    assert accepted.rows == (row("tq3", kl=0.0289),)
    assert chosen(profile, "tq4").name == "tq4"


def test_a_named_codec_waits_exactly_for_its_measurement():
    waiting = chosen(None, "tq3")
    assert (waiting.name, waiting.unmeasured) == ("raw", True) and "tq3 was not" in waiting.why
    assert chosen(None, "max").unmeasured  # it cannot even be made yet
    assert chosen(None, "tq3", accept_loss=True).name == "tq3"
    assert chosen(None, "max", accept_loss=True).name == "raw"


def test_without_a_measurement_to_come_it_is_refused():
    with pytest.raises(CodecRefused, match="not measured on this model; .* thermocline calibrate"):
        chosen(None, "tq3", calibrate=False)
    with pytest.raises(CodecRefused, match="cannot be measured on this model: it has windows"):
        chosen(None, "tq3", "it has windows")
    with pytest.raises(CodecRefused, match="yet to learn this model.*calibrate$"):
        chosen(None, "max", calibrate=False, accept_loss=True)
    with pytest.raises(CodecRefused, match="it has windows; use raw$"):
        chosen(None, "max", "it has windows", accept_loss=True)
    found = chosen(None, unmeasurable="it has windows")
    assert (found.name, found.unmeasured) == ("raw", False) and "it has windows" in found.why


@pytest.mark.parametrize("name", ["raw", "kvstore.codecs.base:RawCodec"])
def test_an_exact_codec_needs_no_measurement(name: str):
    choice = chosen(None, name, calibrate=False)
    assert (choice.name, choice.unmeasured, choice.codec.id) == (name, False, "raw.1")


def test_a_codec_that_cannot_be_had():
    with pytest.raises(UnknownCodec, match="no codec named 'zip'"):
        chosen(None, "zip")


def test_a_model_that_packs_nothing_needs_no_choice():
    choice = choose("tq3", StoreConfig(calibrate=False), KVLayout("float32", ()), None)
    assert (choice.name, choice.unmeasured) == ("raw", False)


# ---- a live cache that is packed itself


def packed(profile: Profile | None, **settings: Any) -> Choice:
    config = StoreConfig(codec="auto", **settings)
    layers = model_profile().layout.layers
    layout = PackedLayout(dtype="bfloat16", layers=layers, num_bits=4)
    return choose("auto", config, layout, profile)


def test_live_kv_is_packed_where_that_keeps_the_bound():
    choice = packed(measured(row("tq4"), *all_timed()[:3]))
    assert choice.name == "tq4" and choice.rows == (row("tq4"),)


@pytest.mark.parametrize("rows", [None, (), ({"kl": 0.5},)])
def test_elsewhere_only_by_who_accepts_the_loss(rows: Rows):
    profile = profile_of("tq4", rows)
    with pytest.raises(CodecRefused, match="hot_codec.*store.accept_loss"):
        packed(profile)
    assert packed(profile, accept_loss=True).why.startswith("the loss was accepted")


@pytest.mark.slow
def test_presets_that_learned_turned_parts_of_latents_never_serve():
    """Only keys are turned back, so these were learned at the positions of short texts."""
    layout = KVLayout("bfloat16", (KVLayer(1, 32, 16),) * 2)
    texts = [layout.empty(300) for _ in range(2)]
    for number, array in enumerate(x for text in texts for pair in text for x in pair):
        array[:] = np.random.default_rng(number).integers(0, 1 << 14, array.shape)
    profile = learn_profile(Samples(layout, (None, None), texts), "latents", ["dense3"])
    rows = tuple(
        msgspec.structs.replace(row(x), codec_id=open_codec(x, profile).id)
        for x in ("dense3", "tq4")
    )
    profile = dataclasses.replace(profile, rows=rows)
    choice = choose("auto", StoreConfig(), layout, profile)
    assert (choice.name, choice.unmeasured) == ("tq4", False)
    assert "does not hold for longer sessions" in choice.why
    with pytest.raises(CodecRefused, match="rotated keys beside this model.s latents"):
        choose("dense3", StoreConfig(), layout, profile)
    assert choose("dense3", StoreConfig(accept_loss=True), layout, profile).name == "dense3"
