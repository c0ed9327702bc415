from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches, CannotServe, leaves, probe
from engines.mlx_worker.sessions.store_opening import restore_fault
from engines.wire import KVSize
from kvstore.blobs.state_tree import StateTree, decode_state, encode_state
from kvstore.errors import Mismatch
from kvstore.shapes import KVLayer, KVLayout

pytestmark = pytest.mark.mlx

WINDOW = 8


class Model:
    """A model that only remembers: token ``t`` at position ``p`` becomes a row of ``t + p / 1000``.

    Its "logits" are sums over everything it remembers, so lost or shifted tokens show.
    """

    def __init__(self, kinds: str, dtype: mx.Dtype = mx.float32) -> None:
        self._kinds, self._dtype = kinds, dtype

    def make_cache(self) -> Caches:
        return [self._cache(kind) for kind in self._kinds]

    def _cache(self, kind: str) -> object:
        if kind == "L":
            return CacheList(KVCache(), ArraysCache(1))
        size = {"K": (), "R": (WINDOW,), "A": (2,)}[kind]
        return {"K": KVCache, "R": RotatingKVCache, "A": ArraysCache}[kind](*size)

    def __call__(self, tokens: mx.array, cache: Caches) -> mx.array:
        rows, num_tokens = tokens.shape
        remembered = mx.zeros((rows,))
        for leaf in leaves(cache):
            if isinstance(leaf, ArraysCache):
                for i in range(len(leaf.cache)):
                    before = mx.zeros((rows, 3)) if leaf[i] is None else leaf[i]
                    leaf[i] = before * 0.9 + tokens.sum(axis=1)[:, None].astype(mx.float32)
                    remembered = remembered + leaf[i].sum(axis=1)
            else:
                at = (mx.arange(num_tokens) + leaf.offset).astype(mx.float32) / 1000
                values = (tokens + at).astype(self._dtype)[:, None, :, None]
                keys = mx.broadcast_to(values, (rows, 2, num_tokens, 4))
                seen = leaf.update_and_fetch(keys, 2 * keys[..., :2])
                remembered = remembered + sum(x.astype(mx.float32).sum((1, 2, 3)) for x in seen)
        return mx.broadcast_to(remembered[:, None, None], (rows, num_tokens, 5))


def fed(model: Model, num_tokens: int) -> Caches:
    caches = model.make_cache()
    model(mx.array([list(range(1, num_tokens + 1))]), caches)
    kv_arrays.compact(caches)
    return caches


def rebuilt(model: Model, caches: Caches, num_tokens: int) -> Caches:
    plan = probe(model)
    run = [(k.copy(), v.copy()) for k, v in kv_arrays.growing_run(caches, num_tokens)]
    state = decode_state(memoryview(encode_state(kv_arrays.state_tree(caches))))
    return kv_arrays.rebuild(model, plan.layout, run, state, num_tokens)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("kinds", ["K", "KKK", "RK", "AK", "A", "LK", "RAL"])
def test_rebuilt_caches_go_on_as_the_originals(kinds: str, dtype: mx.Dtype):
    model = Model(kinds, dtype)
    for num_tokens in (3, WINDOW, 20, 300):
        kept = fed(model, num_tokens)
        woken = rebuilt(model, kept, num_tokens)
        for token in (7, 8):
            step = mx.array([[token]])
            assert mx.array_equal(model(step, kept), model(step, woken))
        assert restore_fault(model, probe(model), 500) == ""


def test_a_view_keeps_its_values_when_the_cache_is_written_over():
    model = Model("K")
    caches = fed(model, 40)
    ((keys, _),) = kv_arrays.growing_run(caches, 40)
    before = keys.copy()
    kv_arrays.trim(caches, 30)
    model(mx.array([[99] * 20]), caches)
    mx.eval(caches[0].state)
    assert np.array_equal(keys, before)


def test_settling_gives_back_unused_memory():
    model = Model("K")
    caches = model.make_cache()
    model(mx.array([[1] * 10]), caches)
    assert kv_arrays.nbytes_of(caches) > 10 * 2 * 6 * 4
    kv_arrays.compact(caches)
    assert kv_arrays.nbytes_of(caches) == 10 * 2 * 6 * 4


def test_the_plan_names_the_growing_layers_and_their_cost():
    plan = probe(Model("KRAL", mx.bfloat16))
    arrays = ("ArraysCache", "KVCache", "ArraysCache")
    assert plan.class_names == ("KVCache", "RotatingKVCache", *arrays)
    assert plan.needs_state
    assert plan.layout == KVLayout(dtype="bfloat16", layers=(KVLayer(2, 4, 2),) * 2)
    assert plan.cost.per_token == 2 * 2 * 6 * 2
    assert plan.cost.windows == ((2 * 6 * 2, WINDOW),)
    assert plan.cost.fixed == 3 * 3 * 4
    assert not probe(Model("KK")).needs_state


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_in_bf16_a_value_takes_two_bytes_for_any_dtype_of_the_engine(dtype: mx.Dtype):
    live, in_bf16 = probe(Model("KRAL", dtype)).kv_sizes()
    assert in_bf16 == KVSize(2 * 2 * 6 * 2, ((2 * 6 * 2, WINDOW),), 3 * 3 * 4)
    wide = dtype.size // 2
    assert live.per_token == wide * in_bf16.per_token and live.fixed == in_bf16.fixed


class Strange(KVCache):
    """A class that the engine does not know."""


def test_an_unknown_cache_class_is_served_but_not_kept(monkeypatch: pytest.MonkeyPatch):
    model = Model("K")
    monkeypatch.setattr(model, "make_cache", lambda: [Strange()])
    plan = probe(model)
    assert plan.layout is None
    assert restore_fault(model, plan, 500) == "its caches of class Strange are not known here"


def test_a_cache_class_that_cannot_be_batched_is_refused(monkeypatch: pytest.MonkeyPatch):
    class Lonely:
        offset = 0
        state = ()
        update_and_fetch = staticmethod(lambda keys, values: (keys, values))

    model = Model("K")
    monkeypatch.setattr(model, "make_cache", lambda: [Lonely()])
    with pytest.raises(CannotServe, match="cannot batch the Lonely"):
        probe(model)


class Wide(Model):
    """Its window is wider than the self-test's text is long."""

    def make_cache(self) -> Caches:
        return [RotatingKVCache(50 * WINDOW), KVCache()]


def forgets(window: RotatingKVCache) -> None:
    window.keys = mx.zeros_like(window.keys)


def loses_its_place(window: RotatingKVCache) -> None:
    if window.offset > window.max_size:
        window.keys = window.keys[..., ::-1, :]


@pytest.mark.parametrize(
    ("model", "fault"), [(Model("RK"), forgets), (Wide("RK"), loses_its_place)]
)
def test_the_self_test_notices_other_contents_also_once_windows_go_round(model, fault, monkeypatch):
    plan, rebuild = probe(model), kv_arrays.rebuild
    assert restore_fault(model, plan, 500) == ""

    def faulty(*arguments: object) -> Caches:
        caches = rebuild(*arguments)  # type: ignore[arg-type]
        fault(caches[0])
        return caches

    monkeypatch.setattr(kv_arrays, "rebuild", faulty)
    assert restore_fault(model, plan, 500) == "its caches came back from a test with other contents"


def pieces() -> tuple[Model, KVLayout, list[tuple[np.ndarray, np.ndarray]], StateTree]:
    model = Model("RK")
    caches, layout = fed(model, 20), probe(model).layout
    assert layout is not None
    return model, layout, kv_arrays.growing_run(caches, 20), kv_arrays.state_tree(caches)


def test_pieces_of_another_model_are_refused():
    model, layout, run, state = pieces()
    assert isinstance(state, list)
    (name, fields), *_ = state  # type: ignore[misc]
    other_window = [(name, (*fields[:4], WINDOW + 1, fields[5]))]  # type: ignore[index, misc]
    wrong: list[tuple[list[tuple[np.ndarray, np.ndarray]], StateTree, int]] = [
        (run, None, 20),
        (run, [], 20),
        (run, [*state, *state], 20),
        (run, [("ArraysCache", fields)], 20),  # type: ignore[list-item]
        (run, other_window, 20),  # type: ignore[list-item]
        ([], state, 20),
        ([*run, *run], state, 20),
        ([(k[:, :19], v[:, :19]) for k, v in run], state, 20),
        ([(k[:, :19], v[:, :19]) for k, v in run], state, 19),
        ([(k.astype(np.float16), v) for k, v in run], state, 20),
    ]
    kv_arrays.rebuild(model, layout, run, state, 20)
    for bad_run, bad_state, num_tokens in wrong:
        with pytest.raises(Mismatch):
            kv_arrays.rebuild(model, layout, bad_run, bad_state, num_tokens)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_are_restored_where_they_stay(dtype: mx.Dtype):
    model = Model("K", dtype)
    caches, layout = fed(model, 20), probe(model).layout
    assert layout is not None
    arrays, out = kv_arrays.empty_rows(layout, 20, 300)
    ((keys, values),), (kept,) = out, kv_arrays.growing_run(caches, 20)
    keys[:], values[:] = kept
    (leaf,) = kv_arrays.rebuild(model, layout, out, None, 20, arrays)
    assert leaf.keys.shape == (1, 2, 512, 4)  # room for the rest of the prompt, in mlx_lm's steps
    assert kv_arrays.as_numpy(leaf.keys).ctypes.data == keys.ctypes.data
    one, other = (model(mx.array([[5, 6]]), x) for x in ([leaf], caches))
    assert mx.array_equal(one, other)
