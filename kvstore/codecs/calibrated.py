"""Learns the arrays of presets from a model, as a profile, and makes codecs from a profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvstore.codecs.catalogue import imported
from kvstore.codecs.learning.samples import Samples, element_means
from kvstore.codecs.names import CALIBRATED, CODECS, family_of, parameters_of
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import StackPacker
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout

ARITHMETIC = 5  # raise it when a calibrated preset's bytes change


class CalibratedPreset(Protocol):
    """A method that learns arrays from a model, and makes codecs from them."""

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays to keep in the profile, by name.

        ``means``: fp32 (elements of a token,), of keys without RoPE.
        """

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> Sequence[StackPacker]:
        """Make one packer for each stack of ``layout`` from the learned arrays.

        Raises:
            KeyError, TypeError, ValueError, IndexError: the arrays are those of another release.
        """


def calibrated_preset(name: str) -> CalibratedPreset:
    """Return the learned preset of that name, with the parameters that the name gives."""
    family = family_of(name)
    learn = CODECS[family].learn
    usual: Any = imported(family, learn) if isinstance(learn, str) else learn
    preset: CalibratedPreset = (
        usual if family == name else dataclasses.replace(usual, **parameters_of(name))
    )
    return preset


def learn_profile(
    samples: Samples, fingerprint: str, presets: Iterable[str] = CALIBRATED
) -> Profile:
    """Make a profile from the arrays that ``presets`` learn from a model; numpy only.

    Takes seconds for presets that treat each layer by itself, minutes for those across layers.
    """
    means = element_means(samples)
    learned = {
        name: {"means": means, **calibrated_preset(name).learn(samples, means)} for name in presets
    }
    return Profile(fingerprint, samples.layout, samples.ropes, learned)


def calibrated_codec(name: str, profile: Profile) -> StackCodec:
    """Make the codec of a preset from the arrays that it learned, in ``profile``.

    Raises:
        UnknownCodec: the profile has no arrays of this preset, or another release wrote it.
    """
    if name not in profile.learned:
        raise UnknownCodec(f"the profile knows no preset {name!r}; calibrate the model again")
    codec_id = f"{family_of(name)}.{ARITHMETIC}-{profile.ids[name]}"
    try:
        return StackCodec(codec_id, _Assembled(calibrated_preset(name), name, profile))
    except (LookupError, TypeError, ValueError) as error:  # arrays of another release
        raise UnknownCodec(
            f"the profile's preset {name!r} is of another release ({error}); calibrate again"
        ) from error


class _Assembled:
    """Returns the packers of the profile's layout, and refuses every other layout.

    Keeps no more of the profile than the packers need.
    """

    def __init__(self, preset: CalibratedPreset, name: str, profile: Profile) -> None:
        learned = profile.learned[name]
        _check_model(profile, learned)
        self._name, self._layers = name, profile.layout.layers
        self.pipelines = preset.assemble(profile, learned, profile.layout)

    def __call__(self, layout: KVLayout) -> Sequence[StackPacker]:
        if layout.layers != self._layers:
            raise UnknownCodec(f"codec {self._name} was calibrated for a model of other layers")
        return self.pipelines


def _check_model(profile: Profile, learned: Mapping[str, np.ndarray]) -> None:
    """Check means and RoPE tables, which kernels use unchecked. Raises ``ValueError``."""
    layers, ropes = profile.layout.layers, profile.ropes
    if len(ropes) != len(layers):
        raise ValueError(f"RoPE of {len(ropes)} layers, not {len(layers)}")
    for rope, layer in zip(ropes, layers, strict=True):
        if rope is not None and rope.num_channels > layer.head_dim:
            raise ValueError(f"RoPE of {rope.num_channels} of {layer.head_dim} channels")
    means, size = learned["means"], profile.layout.elements_per_token
    if means.dtype != np.float32 or means.shape != (size,) or not np.isfinite(means).all():
        raise ValueError(f"means are {means.dtype} {means.shape}, or not finite")
