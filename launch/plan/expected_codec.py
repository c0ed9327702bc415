"""The codec that the engine will choose at its start, found without loading the model."""

from __future__ import annotations

from collections.abc import Mapping

from engines.calibration.gate.choice import Choice, choose_tiers, exact
from engines.kv_budget import HOT_CODECS
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.session import TIER_NAMES, TierName
from kvstore.shapes import KVLayout
from launch.calibrate.profile_notes import find_profile
from launch.model import find_model
from launch.plan.served_cache import served_cache, served_dtype
from launch.settings.effective_settings import EffectiveSettings


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
