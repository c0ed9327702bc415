"""Reading off how keys are turned, from matrices made by hand and from keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engines.calibration.instrument import NOTHING, HeldSession
from engines.calibration.rope_probe import Turned, check_turning, read_rope
from kvstore.shapes import KVLayer, KVLayout, Rope
from tests.unit.engines.calibration.test_learn import Blind

DIM = 16


def frequencies(num_pairs: int) -> np.ndarray:
    return 1e4 ** (-np.arange(num_pairs) / num_pairs)


def turning(
    num_pairs: int, *, interleaved: bool = False, stretch: float = 1, digits: int = 24
) -> Turned:
    """Sines that keep only so many binary ``digits``."""

    def turned(position: int) -> np.ndarray:
        matrix = np.eye(DIM)
        for i, angle in enumerate(frequencies(num_pairs) * position):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + num_pairs)
            cos, sin = _kept(np.cos(angle), digits), _kept(np.sin(angle), digits)
            matrix[np.ix_([a, b], [a, b])] = stretch * np.array([[cos, sin], [-sin, cos]])
        return matrix.astype(np.float32)

    return turned


def _kept(number: float, digits: int) -> float:
    mantissa, exponent = np.frexp(number)
    return float(np.ldexp(np.round(np.ldexp(mantissa, digits)), exponent - digits))


@pytest.mark.parametrize("num_pairs", [3, 8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("stretch", [1, 1.2])
@pytest.mark.parametrize("digits", [24, 8])
def test_pairs_and_angles(num_pairs: int, interleaved: bool, stretch: float, digits: int) -> None:
    given = turning(num_pairs, interleaved=interleaved, stretch=stretch, digits=digits)
    rope = read_rope(given)
    assert rope.interleaved == interleaved
    # Off by this much at most, keys of 4,000 tokens are turned back to within 0.02.
    assert np.abs(np.array(rope.frequencies) - frequencies(num_pairs)).max() < 5e-6


def test_a_turn_that_speeds_up_is_not_understood() -> None:
    plain = turning(8)
    with pytest.raises(ValueError, match="not understood"):
        read_rope(lambda position: plain(position + position // 5))


class OneTokenModel(Blind):
    """Keys of a prompt of one token: one vector, turned."""

    layout = KVLayout("float32", (KVLayer(2, DIM, DIM),))
    ropes = (Rope(tuple(frequencies(8).tolist())),)

    def __init__(self, turned: Turned) -> None:
        self._turned = turned

    def encode(self, text: str) -> list[int]:
        return [1, 5]

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        plain = np.random.default_rng(0).standard_normal((2, DIM)).astype(np.float32)
        keys = np.stack([plain @ self._turned(i) for i in range(len(tokens))], 1)
        return HeldSession([(keys, keys)], len(tokens))


@pytest.mark.parametrize(
    "turned",
    [
        turning(8, interleaved=True),
        turning(7),
        lambda position: turning(8)(position // 2),
        lambda position: turning(8)(0),
    ],
)
def test_keys_that_are_turned_otherwise(turned: Turned) -> None:
    model = OneTokenModel(turned)
    with pytest.raises(ValueError, match="not understood"):
        check_turning(model, model.ropes)


def test_keys_of_a_past_that_is_short_may_be_others() -> None:
    """Attention sinks take more there, and a router may choose other experts."""

    class WithSinks(OneTokenModel):
        def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
            ((keys, values),) = super().prefill(tokens, past).run
            keys[:, :50] *= -1
            keys[:, 200] = 0
            return HeldSession([(keys, values)], len(tokens))

    model = WithSinks(turning(8))
    check_turning(model, model.ropes)
    model = WithSinks(turning(7))
    with pytest.raises(ValueError, match="not understood"):
        check_turning(model, model.ropes)


def test_keys_that_are_not_turned_at_all() -> None:
    assert read_rope(lambda position: np.eye(DIM, dtype=np.float32)) is None
    check_turning(OneTokenModel(turning(8)), [Rope(tuple(frequencies(8).tolist()))])
    check_turning(OneTokenModel(lambda position: np.eye(DIM, dtype=np.float32)), [None])
    with pytest.raises(ValueError, match="not understood"):
        check_turning(OneTokenModel(turning(8)), [None])
