"""The codec that the engine will choose, and whether it will measure the model first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engines.calibration.first_order import TooShort, first_order, tokens_to_compute
from engines.calibration.gate.choice import Choice, choose_tiers, exact
from engines.kv_budget import HOT_CODECS, UNSTATED_CONTEXT, stated_context
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.session import TIER_NAMES, TierName
from kvstore.shapes import KVLayout, StateLayout
from launch.calibrate.profile_notes import find_profile
from launch.families.cache_shape import NotUnderstood
from launch.model import find_model
from launch.plan.hot_budget import served_cache, served_dtype
from launch.settings.effective_settings import EffectiveSettings

BY_HAND = "run: thermocline calibrate"


def expected_choices(effective: EffectiveSettings) -> Mapping[TierName, Choice]:
    """The codec that the engine would choose for each tier.

    Raises:
        CodecRefused, UnknownCodec: see ``choose_tiers``.
        NotUnderstood: config.json does not say what the model's cache is like.
        UsageError, LaunchError: there is no such model.
    """
    engine, store = effective.settings.engine, effective.settings.store
    content = find_model(engine.model, effective.folders.cache).config()
    shape, profile = served_cache(effective, content), find_profile(effective)
    if shape.exact_only:
        return dict.fromkeys(TIER_NAMES, exact(shape.exact_only))
    layout = KVLayout(served_dtype(effective, content), shape.growing)
    if profile is not None:
        layout = profile.layout  # of one rank
    if num_bits := HOT_CODECS.get(engine.hot_codec):
        layout = PackedLayout(dtype=layout.dtype, layers=layout.layers, num_bits=num_bits)
    return choose_tiers(store, layout, profile, states=shape.states(layout.dtype))


class Outlook(NamedTuple):
    """The answer: whether the first start will measure the model, with details or the reason."""

    will_be: bool
    text: str


def in_words(choice: Choice) -> str:
    """The codec, and why it is this one."""
    size = ", exact but large" if choice.unmeasured else ""
    return f"{choice.name}{size} ({choice.why})"


def first_measurement(effective: EffectiveSettings) -> Outlook:
    """Say what the engine will measure of this model while it serves it for the first time."""
    store = effective.settings.store
    if not store.calibrate:
        return Outlook(False, BY_HAND)
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    longest = effective.settings.engine.max_context
    try:
        order = first_order(
            store, longest or stated_context(model.config()) or UNSTATED_CONTEXT, ""
        )
    except TooShort as error:
        return Outlook(False, f"it will not be measured: {error}; {BY_HAND}")
    tokens = tokens_to_compute(order, _states(effective))
    presets, thousands = ", ".join(order.presets), round(tokens / 1000)
    return Outlook(
        True,
        f"the engine measures it in idle moments of its first start ({presets}), about as long as"
        f" it takes to prefill {thousands} prompts of 1,000 tokens",
    )


def _states(effective: EffectiveSettings) -> StateLayout | None:
    """Look up what the model keeps besides rows of every token; None = nothing, or unknown."""
    content = find_model(effective.settings.engine.model, effective.folders.cache).config()
    try:
        return served_cache(effective, content).states(served_dtype(effective, content))
    except NotUnderstood:
        return None
