"""The plan of a fixed rate's payload: payloads of the codec come apart and together again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.fixed_rate.rate_pipeline import RatePayload, plan_rates, rate_pipelines
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.stacks.fused import for_sizes_alone
from kvstore.errors import Corrupt
from tests.unit.kvstore.codecs.fixed_rate.integer_models import codec_of, layout_with, rope_of
from tests.unit.kvstore.codecs.samples import run_of

LAYOUT = layout_with((96, 64), (96, 64))  # two stacks
with for_sizes_alone():  # no kernels: they take seconds to compile, and give the same bytes
    CODEC = codec_of(LAYOUT, rope_of(96))
    PIPELINES = rate_pipelines(CODEC, LAYOUT)
INFINITY = 0x7F80


def plan_of(num_tokens: int, first_token: int) -> RatePayload:
    return plan_rates(PIPELINES, LAYOUT, num_tokens, first_token)


@given(st.data())
def test_a_payload_is_taken_apart_and_put_together_again(data):
    num_tokens = data.draw(st.integers(5, 40))
    first_token = data.draw(st.sampled_from([0, 2, 4, 77]))
    run = run_of(LAYOUT, num_tokens)
    place = st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, num_tokens - 1))
    for layer, head, token in data.draw(st.lists(place, max_size=4)):
        side = data.draw(st.integers(0, 1))
        run[int(layer)][side][head, token, 3] = INFINITY
    payload = bytes(CODEC.encode(run, LAYOUT, first_token))
    plan = plan_of(num_tokens, first_token)
    plain = np.full(plan.nbytes, 7, np.uint8)
    kept = plan.split(memoryview(payload), plain)
    assert plan.join(plain, kept) == payload
    if not any(len(x.numbers) for x in kept):
        assert plain.tobytes() == payload


def test_kept_rows_are_the_ones_of_the_run():
    run = run_of(LAYOUT, 20)
    run[1][0][1, 9, 5] = INFINITY
    plan = plan_of(20, 0)
    payload = memoryview(bytes(CODEC.encode(run, LAYOUT, 0)))
    keys, values = plan.split(payload, np.empty(plan.nbytes, np.uint8))
    assert len(values.numbers) == 0
    unit, token = divmod(int(keys.numbers[0]), plan.num_tokens)
    (vector,) = PIPELINES[0].shape.units[unit]
    assert (vector.layer, vector.head, token) == (1, 1, 9 - plan.num_sinks)
    assert np.array_equal(keys.values[0], run[1][0][1, 9])


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_payload_of_nothing_but_first_tokens(num_tokens):
    run = run_of(LAYOUT, num_tokens)
    payload = bytes(CODEC.encode(run, LAYOUT, 0))
    plan = plan_of(num_tokens, 0)
    plain = np.empty(plan.nbytes, np.uint8)
    assert plan.split(memoryview(payload), plain) == []
    assert plan.join(plain, []) == plain.tobytes() == payload


@given(st.integers(-40, 40).filter(bool))
def test_a_payload_of_another_length_is_refused(extra):
    payload = bytes(CODEC.encode(run_of(LAYOUT, 20), LAYOUT, 0))
    wrong = payload + bytes(extra) if extra > 0 else payload[:extra]
    plan = plan_of(20, 0)
    with pytest.raises(Corrupt):
        plan.split(memoryview(wrong), np.empty(plan.nbytes, np.uint8))


def test_only_a_fixed_rate_has_such_pipelines():
    assert len(PIPELINES) == 2
    assert rate_pipelines(codec_by_name("tq3"), LAYOUT) == ()
    assert rate_pipelines(codec_by_name("dense3"), LAYOUT) == ()  # without a profile
