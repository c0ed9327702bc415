"""Names of chunks and keys of blobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from kvstore.blobs.chain import (
    KEY_BYTES,
    KINDS,
    NAME_BYTES,
    ChainKeys,
    ChainMaker,
    as_tokens,
    joined,
    num_common,
    record_key,
    split,
)
from kvstore.session import chunk_of_blocks

SIZE = 16
BLOCK = 4
MAKER = ChainMaker("f", SIZE)


def names(tokens: Sequence[int], salt: bytes = b"salt", maker: ChainMaker = MAKER) -> list[bytes]:
    return maker.of_tokens(salt, as_tokens(tokens))


def hashes(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """As vLLM makes them: over the one before and the block's tokens; the salt in the first."""
    chain = [salt.encode()]
    for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain.append(sha256(chain[-1] + repr(list(tokens[i : i + BLOCK])).encode()).digest())
    return chain[1:]


def test_equal_prefixes_have_equal_names_and_only_they():
    a = names(range(70))
    b = names([*range(40), 99, *range(41, 64)])
    assert len(a) == 4
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])


MAKERS = [{"maker": ChainMaker("g", SIZE)}, {"maker": ChainMaker("f", 32)}]


@pytest.mark.parametrize("other", [{"salt": b"other"}, {"salt": b""}, *MAKERS])
def test_each_difference_that_forbids_sharing_changes_every_name(other):
    assert not set(names(range(64))) & set(names(range(64), **other))


def test_fields_cannot_run_into_each_other():
    one, other = ChainMaker("ab", SIZE), ChainMaker("abc", SIZE)
    assert names(range(SIZE), b"c", one) != names(range(SIZE), b"", other)
    assert record_key("a", "bc", "m") != record_key("ab", "c", "m") != record_key("ab", "", "cm")


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(0, 12))
def test_known_names_need_not_be_hashed_again(tokens, num_known):
    whole = names(tokens)
    assert MAKER.of_tokens(b"salt", as_tokens(tokens), whole[:num_known]) == whole


@given(
    st.lists(st.integers(0, 2), max_size=150),
    st.lists(st.integers(0, 2), max_size=150),
    st.booleans(),
)
def test_the_common_beginning_of_two_chains_is_that_of_their_tokens(a, b, by_blocks):
    def chain(tokens):
        return MAKER.of_blocks(hashes(tokens), BLOCK) if by_blocks else names(tokens)

    same = len(os.path.commonprefix([a, b]))
    assert num_common(chain(a), chain(b)) == same // SIZE
    assert split(joined(chain(a))) == chain(a)


def test_blocks_of_an_engine_are_named_by_the_last_of_each_chunk():
    chain = MAKER.of_blocks(hashes(range(70)), BLOCK)
    assert len(chain) == 4 and all(len(x) == NAME_BYTES for x in chain)
    assert chain == MAKER.of_blocks(hashes(range(64)), BLOCK)
    salted = MAKER.of_blocks(hashes(range(64), "salt"), BLOCK)
    of_another = ChainMaker("g", SIZE).of_blocks(hashes(range(64)), BLOCK)
    assert not any(set(chain) & set(x) for x in (salted, of_another, names(range(64))))


@pytest.mark.parametrize(("block", "chunk"), [(1, 32), (16, 32), (32, 32), (48, 48), (784, 784)])
def test_a_chunk_is_whole_blocks(block, chunk):
    assert chunk_of_blocks(block) == chunk


@given(st.text(), st.text(), st.text())
@example("../../x", "a\0b", "x" * 4096)
@example("\ud800", "€:@", "")
def test_any_ids_make_a_key_of_fixed_size_of_their_own(tenant, session_id, model):
    key = record_key(tenant, session_id, model)
    assert len(key) == KEY_BYTES and key[:1] in KINDS
    assert key not in (
        record_key(tenant + "x", session_id, model),
        record_key(tenant, session_id + "x", model),
        record_key(tenant, session_id, model + "x"),
    )


@given(st.integers(1, 300), st.integers(1, 20))
def test_windows_are_the_rows_of_the_newest_tokens_without_a_hole(window_tokens, num_chunks):
    keys, chain = ChainKeys(SIZE, window_tokens=window_tokens), names(range(20 * SIZE))
    pieces = keys.windows(chain, num_chunks)
    end = num_chunks * SIZE
    assert pieces[0].first_token == max(end - window_tokens, 0)
    assert pieces[-1].end_token == end
    assert all(a.end_token == b.first_token for a, b in zip(pieces, pieces[1:], strict=False))
    assert all(x.is_window for x in pieces) and len({x.key for x in pieces}) == len(pieces)
    # Whole chunks go by their own names, so two states share them; the part of one does not.
    whole = {b"w" + x for x in chain}
    assert all(x.key in whole for x in pieces[1:])
    assert (pieces[0].key in whole) == (pieces[0].num_tokens == SIZE)


def test_a_model_without_growing_layers_has_no_chunks():
    keys = ChainKeys(SIZE, growing=False)
    chain = names(range(64))
    assert keys.chunks(chain) == [] and keys.windows(chain, 4) == []
    assert keys.state(chain, 4).first_token == 64


def test_names_and_keys_are_frozen():
    """Stored sessions are found by these names: a change of them needs a new format version."""
    chain, blocks = names(range(40)), MAKER.of_blocks(hashes(range(40)), BLOCK)
    keys = ChainKeys(SIZE, window_tokens=20)
    pieces = [*keys.chunks(chain), keys.state(chain, 2), *keys.windows(chain, 2)]
    found = [*(x.key for x in pieces), record_key("t", "s", "m"), *blocks]
    assert [x.hex()[:18] for x in found] == [
        "637d3f55d7b3f680ef",
        "632ad81cafaa3ab40d",
        "732ad81cafaa3ab40d",
        "77d9e8dd03ed307d96",
        "772ad81cafaa3ab40d",
        "72f439a017f453ae4e",
        "324f70f667bfc84621",
        "04115aa7f1edc71a50",
    ]


def test_a_token_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        as_tokens([2**31])
