"""What is wrong with an argument is said in a sentence, with what is wanted."""

from __future__ import annotations

import numpy as np
import pytest

import thermocline
from kvstore.codecs.names import CODECS
from kvstore.errors import UnknownCodec

TQ3 = thermocline.codec("tq3")
ROWS = np.ones((2, 8, 64), np.float32)


def broken(value: float) -> np.ndarray:
    rows = ROWS.copy()
    rows[1, 5, 3] = value
    return rows


class Half:
    """Has an id, and nothing else."""

    id = "half"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: thermocline.codec("kivi", bits="four"), UnknownCodec, "number from 1 to 8"),
        (
            lambda: thermocline.codec("kivi", bits=None),
            UnknownCodec,
            "bits=None of codec 'kivi': a",
        ),
        (
            lambda: thermocline.codec("kivi", bits=True),
            UnknownCodec,
            "bits=True of codec 'kivi': a",
        ),
        (lambda: thermocline.Method("kivi"), UnknownCodec, "is 'kivi', which is no codec"),
        (lambda: thermocline.Method(Half), UnknownCodec, r"an object of it, Half\(\), is wanted"),
        (lambda: thermocline.Method(Half()), UnknownCodec, "is a Half, which is no codec"),
        (lambda: thermocline.layout_of(__file__), OSError, "give the folder of a model"),
        (lambda: thermocline.codec(3), UnknownCodec, "a name is wanted"),
        (lambda: thermocline.codebook("3"), ValueError, "a whole number from 1 to 8"),
        (lambda: thermocline.layout_of(None), ValueError, "no layout of a NoneType"),
        (lambda: thermocline.layout_of("Qwen/Qwen3-32B"), OSError, "nothing is downloaded here"),
        (lambda: thermocline.learn(np.zeros((2, 3, 4))), ValueError, "Samples are wanted"),
        (lambda: thermocline.judge(None, ["tq3"], [[1] * 640]), ValueError, "is no model"),
        (lambda: TQ3.pack([[1, 2]]), ValueError, "a numpy array is wanted"),
        (lambda: TQ3.pack_run([([1], [2])]), ValueError, "a numpy array is wanted"),
        (lambda: TQ3.pack(broken(np.nan)), ValueError, r"NaN or infinite .* at \(1, 5, 3\)"),
        (lambda: TQ3.pack(broken(-np.inf).astype("f2")), ValueError, "NaN or infinite"),
        (lambda: TQ3.pack(np.full((1, 8, 64), 0xFFC0, "u2")), ValueError, "NaN or infinite"),
        (lambda: TQ3.pack_run([(ROWS, broken(np.inf))]), ValueError, "NaN or infinite"),
        (lambda: TQ3.restore(b"abc"), ValueError, "a Packed is wanted"),
        (lambda: TQ3.scores(ROWS, None), ValueError, "a Packed is wanted"),
    ],
)
def test_a_sentence_says_what_is_wanted(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_an_exact_method_takes_any_value():
    raw = thermocline.codec("raw")
    rows = broken(np.nan)
    assert np.array_equal(raw.restore(raw.pack(rows)), rows, equal_nan=True)


class OfNothing:
    """Packs everything into nothing."""

    id, exact = "nothing", False

    def check(self, layout):
        pass

    def packed_nbytes(self, layout, num_tokens, first_token):
        return 0

    least_nbytes = encode = decode = packed_nbytes


def test_a_class_that_is_no_codec_is_refused_by_what_it_lacks():
    before = dict(CODECS)
    with pytest.raises(UnknownCodec, match="it has no exact, check, packed_nbytes, least_nbytes"):
        thermocline.register("half", Half)
    with pytest.raises(UnknownCodec, match="into no bytes"):
        thermocline.register("nothing", OfNothing)
    assert dict(CODECS) == before
