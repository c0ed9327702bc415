"""The table of calibrated presets, and codecs of them for a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from kvstore.codecs.fixed_rate import FixedRate
from kvstore.codecs.learned_seeds import LEARNED_SEEDS
from kvstore.codecs.one_step import OneStep
from kvstore.codecs.pipeline import StackPart
from kvstore.codecs.prediction_design import Reach
from kvstore.codecs.profile import Profile
from kvstore.codecs.samples import Samples
from kvstore.codecs.stack_codec import StackCodec
from kvstore.codecs.stacks import Scope
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout


class Preset(Protocol):
    """What a method learns of a model, and the pipelines that it makes of that."""

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]: ...

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> Sequence[StackPart]: ...


CALIBRATED: dict[str, Preset] = {
    "dense3": FixedRate(Scope("head"), 3.155),  # 3.25 at 64 values per head, all counted
    "balanced": OneStep(Scope("layer"), 1.35, Reach(384, 2)),
    "max": OneStep(Scope("group", 10), 0.70, Reach(768, 2)),
    "safe": OneStep(Scope("layer"), 5.2, Reach(384, 2)),
}
# With those of the literature, which are learned only where they are asked for.
LEARNABLE: dict[str, Preset] = {**CALIBRATED, **LEARNED_SEEDS}
ARITHMETIC = 4  # raise it when a calibrated preset's bytes change


def calibrated_codec(name: str, profile: Profile) -> StackCodec:
    """Raises ``UnknownCodec`` for a preset that the profile has learned nothing for."""
    if name not in profile.learned:
        raise UnknownCodec(f"the profile knows no preset {name!r}; calibrate the model again")
    codec_id = f"{name}.{ARITHMETIC}-{profile.ids[name]}"
    try:
        return StackCodec(codec_id, _Assembled(LEARNABLE[name], name, profile))
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
    ) as error:  # whole, but not what this release learns
        raise UnknownCodec(
            f"the profile's preset {name!r} is of another release ({error}); calibrate again"
        ) from error


class _Assembled:
    """The pipelines of one layout: a profile is of one model, so there is no other.

    Of the profile no more is kept than they need.
    """

    def __init__(self, preset: Preset, name: str, profile: Profile) -> None:
        learned = profile.learned[name]
        _check_model(profile, learned)
        self._name, self._layers = name, profile.layout.layers
        self.pipelines = preset.assemble(profile, learned, profile.layout)

    def __call__(self, layout: KVLayout) -> Sequence[StackPart]:
        if layout.layers != self._layers:
            raise UnknownCodec(f"codec {self._name} was calibrated for a model of other layers")
        return self.pipelines


def _check_model(profile: Profile, learned: Mapping[str, np.ndarray]) -> None:
    """Kernels read means and turn channels without looking. Raises ``ValueError``."""
    layers, ropes = profile.layout.layers, profile.ropes
    if len(ropes) != len(layers):
        raise ValueError(f"turns of {len(ropes)} layers, not {len(layers)}")
    for rope, layer in zip(ropes, layers, strict=True):
        if rope is not None and rope.num_channels > layer.head_dim:
            raise ValueError(f"turns of {rope.num_channels} of {layer.head_dim} channels")
    means, size = learned["means"], profile.layout.elements_per_token
    if means.dtype != np.float32 or means.shape != (size,) or not np.isfinite(means).all():
        raise ValueError(f"means are {means.dtype} {means.shape}, or infinite")
