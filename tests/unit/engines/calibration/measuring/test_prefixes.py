"""Which prefixes are not computed again, by an instrument that counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.calibration.measuring.cases import Case, in_reading_order
from engines.calibration.measuring.prefixes import LEAST_SHARED, Prefixes, common_length
from kvstore.shapes import KVLayer, KVLayout, KVPair, KVRun


class Counting:
    """Its KV is the tokens themselves."""

    layout = KVLayout("float32", (KVLayer(1, 1, 1),))
    fingerprint = "f"
    ropes = (None,)

    def __init__(self) -> None:
        self.computed: list[int] = []

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> list[KVPair]:
        first = past[0][0].shape[1] if past else 0
        self.computed.append(len(tokens) - first)
        old = past[0][0][0, :, 0] if past else np.empty(0, np.float32)
        rows = np.concatenate([old, np.array(tokens[first:], np.float32)])[None, :, None]
        return [(rows, rows)]

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        raise NotImplementedError


def test_a_prompt_that_begins_alike_goes_on_from_there() -> None:
    instrument = Counting()
    prefixes = Prefixes(instrument)
    long = list(range(1000))
    for tokens in (long[:400], long, long[:700], [*long[:600], *range(9000, 9300)], [5, 6, 7]):
        ((keys, _),) = prefixes.run(tokens)
        assert keys[0, :, 0].tolist() == tokens
    assert instrument.computed == [400, 600, 300, 3]


def test_a_few_tokens_are_computed_again() -> None:
    instrument = Counting()
    prefixes = Prefixes(instrument)
    few = list(range(LEAST_SHARED - 1))
    prefixes.run([*few, 1000])
    prefixes.run([*few, 2000])
    assert instrument.computed == [LEAST_SHARED, LEAST_SHARED]


def test_a_prompt_is_timed_where_all_of_it_was_computed_for_it() -> None:
    times = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0, 30.0, 34.0])
    prefixes, long = Prefixes(Counting(), clock=lambda: next(times)), list(range(1000))
    assert prefixes.prefill_s is None
    prefixes.run(long[:400])
    assert prefixes.prefill_s == 2 / 0.4
    prefixes.run(long)  # goes on from all of it
    assert prefixes.prefill_s == 2 + 3
    prefixes.run([*long[:600], *range(9000, 9300)])  # from a part of it
    assert prefixes.prefill_s is None
    prefixes.run([5] * 500)
    assert prefixes.prefill_s == 8


def test_the_length_of_the_common_prefix() -> None:
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 4]) == 2
    assert common_length([], [1]) == 0


def test_cases_that_begin_alike_follow_each_other() -> None:
    prefixes = [(5, 5, 5), (1, 2, 3), (5, 5), (1, 2, 9), (5, 5, 5, 1)]
    ordered = in_reading_order([Case("x", x, (0,)) for x in prefixes])
    assert [x.prefix for x in ordered] == sorted(prefixes)
