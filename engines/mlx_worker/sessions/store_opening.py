"""Opens the cold store for a loaded model, or says why there is none.

Problems with hibernation never prevent serving, except for two mistakes of the operator: naming a
codec whose cost on this model exceeds the bound, and naming a data folder that another engine uses.

First a self-test checks that this model's KV survives hibernation. A few tokens are fed; their
caches are converted to numpy and, through the store's own format of states, back; then both copies
continue. The rebuilt copy must hold the same bits, come out of a batch unchanged, and give the same
next logits. A model with rotating windows is tested a second time, with windows so small that they
wrap around. The test detects changes of mlx_lm's cache classes between versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from engines.calibration.gate.served_codecs import MeasuredModel, ServedCodecs
from engines.kv_budget import MOST_EXACT
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan, Caches, CannotServe, leaves, probe
from engines.mlx_worker.model.loading import LoadedModel, fingerprint
from kvstore.blobs.state_tree import decode_state, encode_state
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused, TierInUse, UnknownCodec
from kvstore.likeness import StoredAs, likeness_of
from kvstore.session import CHUNK_TOKENS
from kvstore.shapes import StateLayout, StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Tier
from kvstore.tiers.registry import open_usable_tiers

NUM_TOKENS = 12
# For packed live KV: enough tokens that some are packed.
NUM_TOKENS_PACKED = MOST_EXACT + 8
# The last ones are fed one by one, as in decoding, which makes a window's write position wrap.
NUM_STEPS = 5
SMALL_WINDOW = 4
# Largest difference of the copies' logits, as a fraction of their spread: kernels that depend on
# the memory layout may round differently.
TOLERANCE = 1e-2


def restore_fault(model: Any, plan: CachePlan, vocab_size: int) -> str:
    """Run the self-test on the owner thread.

    Returns:
        "" if it passes, else one sentence that says why this model's sessions cannot hibernate.
    """
    if plan.layout is None:
        return plan.reason
    try:
        narrow = [_Narrow(model)] if _rotating(make_prompt_cache(model)) else []
        return next(filter(None, (_try(x, plan, vocab_size) for x in (model, *narrow))), "")
    except Exception as error:  # what fails here would also fail in a user's turn
        return f"its caches could not be restored in a test ({type(error).__name__}: {error})"


class _Narrow:
    """The model with small windows; its answers are meaningless, but must be reproducible."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def make_cache(self) -> Caches:
        caches: Caches = make_prompt_cache(self._model)
        for leaf in _rotating(caches):
            leaf.max_size = min(leaf.max_size, leaf.keep + SMALL_WINDOW)
        return caches

    def __call__(self, tokens: mx.array, cache: Caches) -> Any:
        return self._model(tokens, cache=cache)


def _rotating(caches: Caches) -> list[RotatingKVCache]:
    return [leaf for leaf in leaves(caches) if isinstance(leaf, RotatingKVCache)]


def _try(model: Any, plan: CachePlan, vocab_size: int) -> str:
    num_tokens = NUM_TOKENS_PACKED if isinstance(plan.layout, PackedLayout) else NUM_TOKENS
    tokens = [(7 * i + 1) % vocab_size for i in range(num_tokens)]
    kept = _fed(model, tokens)
    woken = _asleep_and_awake(model, plan, kept, num_tokens)
    if not _same(kept, woken, num_tokens):
        return "its caches came back from a test with other contents"
    shorter = _fed(model, tokens[: num_tokens // 2])
    batch = [mine.merge([mine, other]) for mine, other in zip(woken, shorter, strict=True)]
    alone = [cache.extract(0) for cache in batch]
    kv_arrays.compact(alone)
    if not _same(kept, alone, num_tokens):
        return "its caches came out of a test batch with other contents"
    step = mx.array([[tokens[0]]])
    expected, got = (model(step, cache=caches)[0, -1] for caches in (kept, woken))
    if not _close(expected, got):
        return "it went on with other tokens after a test restore"
    return ""


def _fed(model: Any, tokens: list[int]) -> Caches:
    caches: Caches = make_prompt_cache(model)
    at_once = len(tokens) - NUM_STEPS
    for part in (tokens[:at_once], *([x] for x in tokens[at_once:])):
        model(mx.array([part]), cache=caches)
        mx.eval([cache.state for cache in caches])
    kv_arrays.compact(caches)
    return caches


def _asleep_and_awake(model: Any, plan: CachePlan, caches: Caches, num_tokens: int) -> Caches:
    assert plan.layout is not None
    kept = [(k.copy(), v.copy()) for k, v in kv_arrays.growing_run(caches, num_tokens)]
    arrays, run = kv_arrays.empty_rows(plan.layout, num_tokens, num_tokens)
    for (keys, values), pair in zip(run, kept, strict=True):
        if arrays:
            keys[:], values[:] = pair
    state = decode_state(memoryview(encode_state(kv_arrays.state_tree(caches))))
    run = run if arrays else kept
    return kv_arrays.rebuild(model, plan.layout, run, state, num_tokens, arrays)


def _same(one: Caches, other: Caches, num_tokens: int) -> bool:
    """Return whether two copies hold the same bits, apart from spare room."""
    runs = (kv_arrays.growing_run(caches, num_tokens) for caches in (one, other))
    pairs = zip(*runs, strict=True)
    equal = all(np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))
    states = (encode_state(kv_arrays.state_tree(caches)) for caches in (one, other))
    return equal and len(set(states)) == 1


def _close(expected: mx.array, got: mx.array) -> bool:
    one, other = (np.array(x.astype(mx.float32)) for x in (expected, got))
    spread = float(np.ptp(one)) or 1.0
    return bool(np.abs(one - other).max() <= TOLERANCE * spread)


@dataclass(frozen=True)
class OpenedStore:
    """A cold store, and the codecs that it uses."""

    store: ColdStore
    codecs: ServedCodecs  # may choose others later


def tiers_of_settings(config: StoreConfig) -> list[Tier]:
    """Open the tiers that the settings ask for. Raises ``TierInUse``."""
    return open_usable_tiers(config, Path(config.disk_path))


def store_opener(
    config: StoreConfig,
    name: str,
    data_path: str = "",
    tiers_of: Callable[[StoreConfig], list[Tier]] = tiers_of_settings,
) -> Callable[[LoadedModel, CachePlan], OpenedStore | str]:
    """Return the function that opens the store for ``Owner``, on its thread; see ``OpenStore``.

    That function raises ``CannotServe`` for a codec that the settings name and the gate refuses,
    and for a data folder that another engine uses.

    Args:
        name: the model's name for clients.
        data_path: the folder of models' profiles; "" = beside the disk tier.
        tiers_of: opens the tiers, and returns them fastest first.
    """
    folder = Path(config.disk_path) if config.disk_path else None
    data = Path(data_path) if data_path else folder

    def open_store(loaded: LoadedModel, plan: CachePlan) -> OpenedStore | str:
        if reason := restore_fault(loaded.model, plan, loaded.vocab_size):
            return reason
        assert plan.layout is not None
        identity = fingerprint(loaded, plan, folder)
        try:
            measured = _measured_as(loaded, plan, folder)
            known = (config, plan.layout, identity, data)
            codecs = ServedCodecs(*known, states=plan.states, measured=measured)
        except CodecRefused as error:
            raise CannotServe(str(error)) from error
        except UnknownCodec as error:
            return f"{error}; choose another codec"
        try:
            tiers = tiers_of(config)
        except TierInUse as error:
            raise CannotServe(str(error)) from error
        if not tiers:
            return "every tier of the cold store is switched off"
        states = plan.states or StateLayout()
        kept = states.windows, states.window_tokens
        model = StoredModel(name, identity, plan.layout, plan.needs_state, *kept)
        stored = StoredAs(
            model=name,
            fingerprint=identity,
            chunk_tokens=CHUNK_TOKENS,
            encrypt=config.encrypt,
        )
        store = ColdStore(config, model, codecs.codecs, tiers)
        store.ledger.likeness = likeness_of(config, stored)
        store.ledger.profiles.opened = codecs.opened
        return OpenedStore(store, codecs)

    return open_store


def _measured_as(loaded: LoadedModel, plan: CachePlan, folder: Path | None) -> MeasuredModel | None:
    """Return the model with plain live caches, as it was measured; None if they are not packed."""
    if not isinstance(plan.layout, PackedLayout):
        return None
    plain = replace(loaded, model=loaded.model.model)
    plain_plan = probe(plain.model)
    assert plain_plan.layout is not None
    return MeasuredModel(fingerprint(plain, plain_plan, folder), plain_plan.layout)
