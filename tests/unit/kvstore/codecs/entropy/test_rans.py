from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.entropy import rans
from kvstore.codecs.entropy.class_coder import ClassCoder
from kvstore.codecs.entropy.tables import (
    FIRST_WIDE,
    MOST_NARROW,
    NUM_CLASSES,
    NUM_SYMBOLS,
    TOTAL,
    SymbolTables,
    classes_of,
    fit_tables,
    plane_bits,
    ratio_of,
)
from kvstore.codecs.loops.compiled import proven
from kvstore.codecs.reader import Reader
from kvstore.errors import Corrupt

RATIOS = np.exp2(np.linspace(-3.5, 9, 60))


def codes_of(ratios, num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    return np.rint(rng.standard_normal((len(ratios), num_tokens)) * ratios[:, None]).astype(
        np.int32
    )


TABLES = fit_tables([(codes_of(RATIOS, 400), classes_of(RATIOS))])


def symbols_of(classes, num_tokens, seed=0):
    """Draws symbols of every class as its table expects them."""
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, TOTAL, (len(classes), num_tokens))
    return np.take_along_axis(TABLES.symbols[classes], slots, axis=1)


SLOTS = TABLES.slots()


def encoded(symbols, classes, tables=TABLES, run=None):
    num_tokens = symbols.shape[1]
    padded = np.full((len(symbols), rans.padded_tokens(num_tokens)), 255, np.uint8)
    padded[:, :num_tokens] = symbols
    return rans.encode(padded, num_tokens, classes, tables, run)


def damaged(stream, number, mask):
    changed = bytearray(stream)
    changed[number % len(stream)] ^= mask
    return np.frombuffer(bytes(changed), np.uint8)


@given(
    st.lists(st.integers(0, NUM_CLASSES - 1), max_size=8), st.integers(0, 40), st.integers(0, 999)
)
def test_symbols_come_back_and_both_ways_give_the_same_bytes(numbers, num_tokens, seed):
    classes = np.array(numbers, np.int64)
    symbols = symbols_of(classes, num_tokens, seed)
    stream = encoded(symbols, classes)
    assert stream == encoded(symbols, classes, run=rans.encode_reference)
    view = np.frombuffer(stream, np.uint8)
    for run in (None, rans.decode_reference):
        assert np.array_equal(
            rans.decode(view, classes, num_tokens, SLOTS, run)[:, :num_tokens], symbols
        )


@given(st.integers(0, 4000), st.integers(1, 255), st.integers(0, 3))
def test_damage_is_noticed_or_gives_other_symbols(number, mask, cut):
    classes = np.arange(0, NUM_CLASSES, 4)
    stream = encoded(symbols_of(classes, 33), classes)
    for bad in (damaged(stream, number, mask), np.frombuffer(stream, np.uint8)[: -1 - cut]):
        for decoder in (rans.decode_reference, None):
            try:
                symbols = rans.decode(bad, classes, 33, SLOTS, decoder)[:, :33]
            except Corrupt:
                continue
            assert np.all(symbols <= TABLES.escapes[classes][:, None])


def test_a_coder_that_gives_other_bytes_is_not_used(caplog):
    def mirrored(symbols, classes, coding, states, words, num_tokens):
        count = rans.encode_reference(symbols, classes, coding, states, words, num_tokens)
        states[:] = states[::-1].copy()
        return count

    def misread(words, num_words, classes, slots, states, found, num_tokens):
        states[:] = states[::-1].copy()
        return rans.decode_reference(words, num_words, classes, slots, states, found, num_tokens)

    right = (rans.encode_reference, rans.decode_reference)
    assert rans.agree(right)
    for wrong in ((mirrored, misread), (rans.encode_reference, misread)):
        assert proven(wrong, right, rans.agree, "coders of the test") is right
    assert "coders of the test" in caplog.text


@pytest.mark.parametrize("nbytes", [0, 1, 127, 129])
def test_a_stream_too_short_is_corrupt(nbytes):
    with pytest.raises(Corrupt):
        rans.decode(np.zeros(nbytes, np.uint8), np.array([5]), 8, SLOTS)


def test_bytes_are_frozen():
    """Stored sessions are read by later versions: a change here makes them unreadable."""
    frequencies, largest = uniform_tables()
    frequencies[:, :4] = [2000, 1500, 500, 96]
    symbols = (np.arange(1500).reshape(3, 500) ** 2 % 7 % 4).astype(np.uint8)
    stream = encoded(symbols, np.array([8, 40, 70]), SymbolTables(frequencies, largest))
    assert len(stream) == 418
    assert hashlib.blake2b(stream, digest_size=8).hexdigest() == "2327b313bd62ac23"


def uniform_tables():
    """Four symbols of 1024 for every class."""
    frequencies = np.zeros((NUM_CLASSES, NUM_SYMBOLS), np.uint16)
    frequencies[:, :4] = TOTAL // 4
    return frequencies, np.ones(NUM_CLASSES, np.uint8)


def test_length_is_close_to_the_entropy():
    ratios = np.array([0.2, 0.5, 1.0, 3.0] * 30)
    classes, codes = classes_of(ratios), codes_of(ratios, 512, seed=1)
    coder = ClassCoder(classes[None], TABLES)
    nbytes = len(coder.write(codes.T[None]))
    entropy = 0.0
    for number in np.unique(classes):
        counts = np.unique(codes[classes == number], return_counts=True)[1]
        shares = counts / counts.sum()
        entropy -= float((counts * np.log2(shares)).sum()) / 8
    assert entropy < nbytes < 1.03 * entropy + 64
    assert coder.nbytes(512) == pytest.approx(nbytes, rel=0.03)


@given(
    st.lists(st.floats(0.01, 900), min_size=1, max_size=12),
    st.integers(0, 70),
    st.integers(0, 99),
    st.floats(0.1, 100),
)
def test_any_codes_come_back(ratios, num_tokens, seed, surprise):
    """However far they are from the tables' distribution; dead components come back as zeros."""
    classes = classes_of(np.array([ratios, ratios[::-1]]))
    coder = ClassCoder(classes, TABLES)
    codes = codes_of(surprise * np.array(ratios + ratios[::-1]), num_tokens, seed)
    codes = codes.reshape(2, len(ratios), num_tokens).swapaxes(1, 2)
    reader = Reader(memoryview(coder.write(codes)))
    expected = np.where(classes[:, None] == 0, 0, codes)
    assert np.array_equal(coder.read(reader, num_tokens), expected)
    reader.expect_end()


def test_classes_are_eighths_of_octaves():
    classes = np.arange(1, NUM_CLASSES)
    assert np.array_equal(classes_of(ratio_of(classes)), classes)
    assert classes_of(np.array([0.0, 1e-9, 1e30])).tolist() == [0, 0, NUM_CLASSES - 1]
    assert plane_bits(classes_of(np.array([7.9, 16.0, 64.0]))).tolist() == [0, 1, 3]


def test_tables_that_cannot_be_are_refused():
    frequencies, largest = uniform_tables()
    SymbolTables(frequencies, largest)
    for bad in (frequencies[:5], frequencies // 2, np.roll(frequencies, 1, axis=1)):
        with pytest.raises(ValueError):
            SymbolTables(bad, largest)
    with pytest.raises(ValueError, match="symbol"):
        SymbolTables(frequencies, largest * 2)


def test_no_byte_of_levels_needs_a_symbol_for_a_large_code():
    frequencies, largest = np.zeros((NUM_CLASSES, NUM_SYMBOLS), np.uint16), np.full(NUM_CLASSES, 16)
    frequencies[:, :34] = TOTAL // 34
    frequencies[:, 0] += TOTAL % 34
    with pytest.raises(ValueError, match="symbol"):
        SymbolTables(frequencies, largest.astype(np.uint8))
    assert TABLES.largest[:FIRST_WIDE].max() == MOST_NARROW
