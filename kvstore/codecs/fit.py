"""From samples to a profile: what every calibrated preset has to know of a model."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.codecs.calibrated import CALIBRATED, LEARNABLE
from kvstore.codecs.profile import Profile
from kvstore.codecs.samples import Samples
from kvstore.codecs.statistics import element_means


def fit_profile(
    samples: Samples, fingerprint: str, presets: Iterable[str] = tuple(CALIBRATED)
) -> Profile:
    """numpy only. Seconds for presets of a layer, minutes for those across layers."""
    means = element_means(samples)
    learned = {name: {"means": means, **LEARNABLE[name].learn(samples, means)} for name in presets}
    return Profile(fingerprint, samples.layout, samples.ropes, learned)
