"""The packed live cache under mlx_lm's own batch generator, on a small real model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, trim_prompt_cache

from engines.kv_budget import BLOCK, MOST_EXACT, NUM_RECENT
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.packed.host_rows import HostRowPacker
from engines.mlx_worker.cache.packed.kv_cache import BatchPackedKVCache, PackedKVCache
from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.rows import RowKind
from engines.mlx_worker.cache.packed_model import PackedCacheModel
from tests.integration.mlx_owner.harness import text
from tests.integration.tiny_models import tiny_model

pytestmark = pytest.mark.mlx

KIND = RowKind(3, 64, "bfloat16")
WAYS = {"host": HostRowPacker, "mlx": MlxRowPacker}


@pytest.fixture(params=WAYS)
def live(request: pytest.FixtureRequest) -> PackedCacheModel:
    model = tiny_model("llama").model
    rows = WAYS[request.param](KIND)
    return PackedCacheModel(model, [(rows, rows)] * len(model.layers), "float32")


def same_kv(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        mx.array_equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x.state, y.state, strict=True)
    )


def packed_end(num_tokens: int) -> int:
    """The end of the packed part of a session of so many tokens."""
    return (num_tokens - NUM_RECENT) // BLOCK * BLOCK


@pytest.mark.parametrize("num_left", [0, 3, 100, 290])
def test_trimming_keeps_the_beginning(live, num_left):
    caches = live.make_cache()
    for chunk in (text(1, 300), text(2, 20)):
        live(mx.array([chunk]), caches)
        kv_arrays.compact(caches)
    before = [read(cache) for cache in caches]
    assert trim_prompt_cache(caches, 320 - num_left) == 320 - num_left
    for cache, (keys, values) in zip(caches, before, strict=True):
        assert cache.offset == num_left
        if num_left:
            now = read(cache)
            assert mx.array_equal(now[0], keys[:, :, :num_left])
            assert mx.array_equal(now[1], values[:, :, :num_left])


def read(cache: PackedKVCache) -> tuple[mx.array, mx.array]:
    """The KV that attention sees, fetched beside a token that is thrown away again."""
    probe = cache.copied()
    nothing = mx.zeros((1, 2, 1, 64))
    keys, values = probe.update_and_fetch(nothing, nothing)
    mx.eval(keys, values)
    return keys[:, :, :-1], values[:, :, :-1]


def test_first_and_newest_tokens_are_exact_and_the_rest_is_the_codecs(live):
    cache = live.make_cache()[0]
    keys = mx.random.normal((1, 2, 256, 64)).astype(mx.bfloat16).astype(mx.float32)
    cache.update_and_fetch(keys, keys)
    mx.eval(cache.state)
    cache.pack_old()
    end = packed_end(256)
    got = read(cache)[0]
    assert mx.array_equal(got[:, :, :4], keys[:, :, :4])
    assert mx.array_equal(got[:, :, end:], keys[:, :, end:])
    packed = MlxRowPacker(KIND).pack(keys[:, :, 4:end].astype(mx.bfloat16))
    right = MlxRowPacker(KIND).unpack(*packed).astype(mx.float32)
    assert mx.array_equal(got[:, :, 4:end], right)


def test_rows_of_zeros_are_packed_and_stay_zero(live):
    cache = live.make_cache()[0]
    keys = mx.random.normal((1, 2, 256, 64))
    keys[:, 1] = 0  # a head that is cut off
    cache.append(keys, keys)
    cache.pack_old()
    assert cache.sides[0].num_packed > 0
    assert not mx.any(read(cache)[0][:, 1]).item()


@pytest.mark.parametrize("strange", [float("inf"), float("nan"), 1e-8])
def test_a_row_that_cannot_be_packed_is_kept_among_packed_ones(live, strange):
    cache = live.make_cache()[0]
    keys = mx.random.normal((1, 2, 300, 64)).astype(mx.bfloat16).astype(mx.float32)
    values = mx.array(keys)
    keys[0, 1, 100] = 0
    keys[0, 1, 100, 5] = strange
    cache.append(keys[:, :, :128], values[:, :, :128])
    cache.pack_old()
    cache.append(keys[:, :, 128:], values[:, :, 128:])
    cache.pack_old()
    assert cache.sides[0].num_packed == packed_end(300) - 4
    assert [side.num_kept for side in cache.sides] == [1, 0]
    copy = cache.copied()
    kv_arrays.compact([copy])
    for each in (cache, copy, cache.merge([cache]).extract(0)):
        got, plain = read(each)
        np.testing.assert_array_equal(np.array(got[0, 1, 100]), bf16(keys[0, 1, 100]))
        assert mx.array_equal(got[0, 0], plain[0, 0])
        assert mx.array_equal(got[0, 1, 101:], plain[0, 1, 101:])
    cache.trim(199)
    np.testing.assert_array_equal(np.array(read(cache)[0][0, 1, 100]), bf16(keys[0, 1, 100]))
    cache.trim(1)
    assert [side.num_kept for side in cache.sides] == [0, 0]


def bf16(values: mx.array) -> np.ndarray:
    return np.array(values.astype(mx.bfloat16).astype(mx.float32))


@pytest.mark.slow
def test_memory_is_counted_packed(live):
    plain, packed = [KVCache() for _ in live.make_cache()], live.make_cache()
    tokens = mx.array([text(1, 1000)])
    for caches in (plain, packed):
        live(tokens, caches)
        kv_arrays.compact(caches)
    per_token = 2 * 2 * KIND.packed_nbytes * len(packed)
    exact = 2 * 2 * 64 * 2 * MOST_EXACT * len(packed)
    nbytes = kv_arrays.nbytes_of(packed)
    assert nbytes <= 1000 * per_token + exact
    assert nbytes < kv_arrays.nbytes_of(plain) / 4


def test_a_batch_is_not_padded(live):
    caches = [live.make_cache()[0] for _ in range(2)]
    for cache, length in zip(caches, (1000, 10), strict=True):
        keys = mx.random.normal((1, 2, length, 64))
        cache.append(keys, keys)
        cache.pack_old()
    batch = caches[0].merge(caches)
    assert isinstance(batch, BatchPackedKVCache)
    assert batch.nbytes == sum(cache.nbytes for cache in caches)
    assert batch.offset.tolist() == [1000, 10]


def test_padding_on_the_left_is_skipped(live):
    """mlx_lm has no caller for it any more, but the protocol does."""
    rows = live.make_cache()[0].packers
    batch = PackedKVCache(rows, "float32").merge([PackedKVCache(rows, "float32")] * 2)
    batch.prepare(left_padding=[2, 0])
    keys = mx.random.normal((2, 2, 5, 64)).astype(mx.bfloat16).astype(mx.float32)
    assert batch.offset.tolist() == [-2, 0]
    got, _ = batch.update_and_fetch(keys, keys)
    assert mx.array_equal(got[0, :, 2:], keys[0, :, 2:])
    assert not mx.any(got[0, :, :2]).item()
    assert mx.array_equal(got[1], keys[1])
    assert batch.extract(0).offset == 3
    with pytest.raises(ValueError, match="empty"):
        batch.prepare(left_padding=[1, 1])


@given(st.data())
def test_each_row_of_a_batch_reads_as_if_alone_after_any_steps(data):
    """Random steps, prompts padded on the right, trims, and rows that come and go."""
    rows = HostRowPacker(KIND)
    singles = [PackedKVCache((rows, rows), "float32") for _ in range(data.draw(st.integers(1, 3)))]
    batch = singles[0].merge(singles)
    for number in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["step", "step", "padded", "trim", "filter", "extend"]))
        if action in ("step", "padded"):
            length = data.draw(st.sampled_from([1, 1, 40, 150]))
            least = 1 if action == "padded" else length
            lengths = [data.draw(st.integers(least, length)) for _ in singles]
            keys = mx.random.normal((len(singles), 2, length, 64), key=mx.random.key(number))
            padding = [length - x for x in lengths]
            batch.prepare(lengths=lengths, right_padding=padding)
            left = [batch.size() - cache.offset for cache in singles]
            got = batch.update_and_fetch(keys, 2 * keys)
            for i, (cache, taken) in enumerate(zip(singles, lengths, strict=True)):
                own = keys[i : i + 1, :, :taken]
                right = cache.update_and_fetch(own, 2 * own)
                for found, expected in zip(got, right, strict=True):
                    mine = found[i, :, left[i] : left[i] + cache.offset]
                    assert mx.array_equal(mine, expected[0])
            batch.finalize()
        elif action == "trim":
            surplus = data.draw(st.integers(0, min(cache.offset for cache in singles)))
            batch.trim(surplus)
            for cache in singles:
                cache.trim(surplus)
        elif action == "filter":
            order = st.lists(st.sampled_from(range(len(singles))), min_size=1, unique=True)
            kept = data.draw(order)
            batch.filter(kept)
            singles = [singles[i] for i in kept]
        elif singles[0].offset:
            twin = singles[0].copied()
            batch.extend(twin.merge([twin]))
            singles.append(twin)
        assert batch.offset.tolist() == [cache.offset for cache in singles]
        for i, cache in enumerate(singles):
            assert batch.extract(i).offset == cache.offset
            assert same_kv([batch.extract(i)], [cache])
