"""Profiles whose arrays no learning gives, and what becomes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from kvstore.codecs.calibrated import calibrated_codec
from kvstore.codecs.profile import Profile
from kvstore.errors import UnknownCodec
from tests.unit.kvstore.codecs.samples import run_of

# Arrays of another form than the learned ones.
SHAPES = {
    "a unit too few": lambda x: x[1:],
    "a unit too many": lambda x: np.concatenate([x, x[:1]]),
    "the last axis is shorter": lambda x: x[..., :-1],
    "the last axis is longer": lambda x: np.concatenate([x, x[..., :1]], axis=-1),
    "one axis less": lambda x: x[0],
    "one axis more": lambda x: x[None],
    "nothing": lambda x: x[:0],
    "other values": lambda x: x.astype(bool),
    "twice as wide": lambda x: x.astype(f"{x.dtype.kind}{2 * x.itemsize}"),
}


def changed(profile: Profile, name: str, array: np.ndarray) -> Profile:
    """The same, but for one array of its only preset."""
    ((preset, learned),) = profile.learned.items()
    return dataclasses.replace(profile, learned={preset: {**learned, name: array}})


def incomplete(profile: Profile) -> Iterator[Profile]:
    """Profiles that lack one array each."""
    ((preset, learned),) = profile.learned.items()
    for name in learned:
        rest = {k: x for k, x in learned.items() if k != name}
        yield dataclasses.replace(profile, learned={preset: rest})


def is_refused(profile: Profile) -> bool:
    (preset,) = profile.learned
    try:
        calibrated_codec(preset, profile)
    except UnknownCodec as error:
        return "calibrate again" in str(error)
    return False


def assert_refused_or_restoring(
    data: st.DataObject, profile: Profile, names: Sequence[str], num_tokens: int
) -> None:
    """Accepted arrays restore the packed rows within their bounds: else this process would end."""
    ((preset, learned),) = profile.learned.items()
    name = data.draw(st.sampled_from([x for x in names if learned[f"{x}.0"].size]))
    array = learned[f"{name}.0"].copy()
    flat = array.reshape(-1).view(np.uint8)
    for at in data.draw(st.lists(st.integers(0, len(flat) - 1), min_size=1, max_size=6)):
        flat[at] = data.draw(st.integers(0, 255))
    try:
        codec = calibrated_codec(preset, changed(profile, f"{name}.0", array))
    except UnknownCodec:
        return
    layout = profile.layout
    out, again = layout.empty(num_tokens), layout.empty(num_tokens)
    payload = codec.encode(run_of(layout, num_tokens), layout, 9)
    for run in (out, again):
        codec.decode(memoryview(payload), layout, 9, run)
    for pair, same in zip(out, again, strict=True):
        assert all(map(np.array_equal, pair, same))
