"""The measurement on a real, if tiny and random, model."""

from __future__ import annotations

import itertools
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from engines.calibration.instrument import HeldSession
from engines.calibration.measuring.cases import Case
from engines.calibration.measuring.measure import Judge
from engines.calibration.measuring.stopwatch import Stopwatch
from engines.mlx_worker.measuring.instrument import MlxInstrument
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import open_session_codec
from tests.integration.calibration.surveys import instrument_of
from tests.integration.tiny_models import VOCAB

pytestmark = pytest.mark.mlx

TOKENS = [(37 * i * i + 11 * i + 3) % VOCAB for i in range(300)]


@pytest.fixture(scope="module")
def instrument() -> MlxInstrument:
    return instrument_of("llama")


def case(num_prefix: int) -> Case:
    return Case("text", tuple(TOKENS[:num_prefix]), tuple(TOKENS[num_prefix : num_prefix + 40]))


def test_fewer_bits_cost_more(instrument: MlxInstrument):
    codecs = {name: codec_by_name(name) for name in ("raw", "tq4", "tq3")}
    rows = {row.preset: row for row in Judge(instrument, [case(256)]).rows(codecs)}
    raw, tq4, tq3 = (rows[name] for name in ("raw", "tq4", "tq3"))
    assert (raw.kl, raw.perplexity_change_pct, raw.top1) == (0, 0, 1)
    assert raw.cos_k == pytest.approx(1) and raw.cos_v == pytest.approx(1)
    assert 32 < raw.bits_per_element < 32.1  # of a float32 engine, and the headers
    assert 0 < tq4.kl < tq3.kl
    assert 1 > tq4.cos_k > tq3.cos_k > 0.9
    assert 3.25 < tq3.bits_per_element < 3.6  # four exact tokens of 256 are 0.2 bits


def test_a_row_for_each_context_and_needles_that_the_model_finds(instrument: MlxInstrument):
    never = Case("needle", tuple(TOKENS[:128]), tuple(TOKENS[128:140]), num_answer=5)
    cases = [case(128), case(256), never]
    rows = Judge(instrument, cases).rows({"tq3": codec_by_name("tq3")})
    assert [(x.context, len(x.texts), x.needle_total) for x in rows] == [(128, 1, 0), (256, 1, 0)]
    asked = TOKENS[128:135]
    scores = instrument.log_probs(instrument.prefill(TOKENS[:128]), asked)
    found = Case("needle", tuple(TOKENS[:128]), (*asked, int(scores[-1].argmax())), num_answer=1)
    (row,) = Judge(instrument, [found]).rows({"raw": codec_by_name("raw")})
    assert (row.needle_found, row.needle_total) == (1, 1)


def chains(num_prefix: int, num_answers: int) -> Case:
    """Any tokens will do: answers are those that the text happens to have."""
    rest = TOKENS[num_prefix : num_prefix + 40]
    places = tuple(range(len(rest) - num_answers, len(rest)))
    return Case("chains", tuple(TOKENS[:num_prefix]), tuple(rest), answers={"table": places})


def test_chains_are_judged_at_their_answers_only(instrument: MlxInstrument):
    codecs = {name: codec_by_name(name) for name in ("raw", "q8", "tq4", "tq2")}
    cases = [case(256), chains(256, 9)]
    rows = {row.preset: row for row in Judge(instrument, cases).rows(codecs)}
    raw, q8, tq4, tq2 = (rows[name] for name in codecs)
    assert (raw.chain_kl, raw.chain_top1, raw.chain_delta_p, raw.delta_p) == (0, 1, 0, 0)
    for row in rows.values():
        assert row.chain_tokens == 9 and [x.text for x in row.chains] == ["table"]
        assert len(row.texts) == 1 and row.chain_kl is not None
    assert 0 < q8.chain_kl < tq4.chain_kl < tq2.chain_kl
    assert 0 < q8.delta_p < tq4.delta_p < tq2.delta_p


def test_restores_are_held_against_prefills(instrument: MlxInstrument):
    """By a clock that ticks once for each look."""
    ticks = itertools.count()
    codecs = {name: codec_by_name(name) for name in ("raw", "tq4")}
    stopwatch = partial(Stopwatch, lambda: float(next(ticks)), dict)
    rows = Judge(instrument, [case(250)], stopwatch=stopwatch).rows(codecs)
    assert [(x.prefill_s, x.restore_s, x.restore_share) for x in rows] == [(4.0, 4.0, 1.0)] * 2
    # By the true clock, but however busy the machine is.
    for row in Judge(instrument, [case(250)], stopwatch=partial(Stopwatch, waits=dict)).rows(
        codecs
    ):
        assert row.prefill_s is not None and row.restore_s is not None
        assert 0 < row.restore_s < 60 and 0 < row.prefill_s < 60


# Of each kind of model: presets of whole sessions, the least lossy first.
WHOLE = {
    "gemma3_text": ("raw", "tq4", "tq3"),
    "qwen3_next": ("raw", "raw+state16", "raw+state8", "raw+state4"),
    "mamba2": ("raw", "raw+state16", "raw+state8", "raw+state4"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_session_is_measured(kind: str):
    instrument = instrument_of(kind)
    assert instrument.states is not None
    codecs = {name: open_session_codec(name, None, instrument.states) for name in WHOLE[kind]}
    rows = {row.preset: row for row in Judge(instrument, [case(256)]).rows(codecs)}
    assert [rows[x].codec_id for x in WHOLE[kind]] == [x.id for x in codecs.values()]
    kls = [rows[x].kl for x in WHOLE[kind]]
    assert kls[0] == 0 and min(kls[1:]) > 0
    assert all(a <= b + 1e-6 for a, b in pairwise(kls))  # below it rounding decides
    bits = [rows[x].bits_per_element for x in WHOLE[kind]]
    assert bits == sorted(bits, reverse=True) and 32 < bits[0] < 34 and bits[-1] < bits[1] < bits[0]


@pytest.mark.parametrize("kind", ["llama", *WHOLE])
def test_a_session_that_is_put_back_says_the_same(kind: str):
    instrument = instrument_of(kind)
    nothing, session = HeldSession((), 0), instrument.prefill(TOKENS[:200])
    whole = instrument.log_probs(nothing, TOKENS[:204])
    split = instrument.log_probs(session, TOKENS[200:204])
    assert whole[200:] == pytest.approx(split, abs=1e-3)
    # And once more: nothing was changed by it.
    assert np.array_equal(instrument.log_probs(session, TOKENS[200:204]), split)
