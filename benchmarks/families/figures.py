"""Puts models of every family to sleep with the preset that the gate gives them, and wakes them.

    python -m benchmarks.families.figures --models mamba2,delta [--json FILE]
    python -m benchmarks.families.figures --models windowed,narrow,latent --source SAMPLE_MODEL

Each model is measured by the survey of ``thermocline calibrate``, ``auto`` chooses by that, and
sessions are saved into a cold store with these codecs, loaded and gone on with. Trained models
are judged by texts of their task and by the answers to it, the sample model with windows or with
latents by the usual texts. Bytes are the store's own count: packed rows, two states, headers.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families.fast_blas import begin_with_blas
from benchmarks.families.latent import write_latent
from benchmarks.families.tasks import ITEM, answer_places, recall_text
from benchmarks.families.trained import trained_model
from benchmarks.families.windowed import NARROW, write_windowed
from benchmarks.stacks.product_stack import write_json
from engines.calibration.calibrate import calibrate
from engines.calibration.corpus import held_out_texts
from engines.calibration.gate.profiles import save
from engines.calibration.gate.served_codecs import ServedCodecs
from engines.calibration.instrument import HeldSession
from engines.calibration.measuring.metrics import drift
from engines.calibration.orders import FALLBACKS, FIRST_PRESETS
from engines.config import CalibrationOrder
from engines.mlx_worker.cache.layout import CachePlan, probe
from engines.mlx_worker.measuring.instrument import MlxInstrument
from engines.mlx_worker.model.loading import load_model
from kvstore.blobs.state_tree import StateArray, StateTree, state_nbytes
from kvstore.codecs.profile import Profile
from kvstore.config import StoreConfig
from kvstore.session import CHUNK_TOKENS, SessionRef
from kvstore.shapes import StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.store.states import StateAt
from kvstore.tiers.ram_tier import RamTier
from tests.kv_sessions import Rows, chain_of

GIB = 1 << 30
CONTEXT = 128  # tokens of a trained model's session
ANSWER = 32  # last tokens of a session; its older state lies before them
TEXTS = 6
SESSIONS = 24


@dataclass(frozen=True)
class Sleeper:
    """A model that was measured, and the texts that its sessions have."""

    name: str
    instrument: MlxInstrument
    plan: CachePlan
    profile: Profile
    data: Path
    texts: Sequence[tuple[list[int], list[int]]]  # the tokens asleep, and the tokens after them


def measured(name: str, folder: Path, data: Path, order: dict[str, Any]) -> Sleeper:
    """Calibrate a model, in fp32."""
    loaded = load_model(str(folder), "float32")
    plan = probe(loaded.model)
    instrument = MlxInstrument(loaded, plan, data)
    usual: dict[str, Any] = {"presets": FIRST_PRESETS + FALLBACKS}
    whole = CalibrationOrder(data_path=str(data), **(usual | order))
    profile = calibrate(instrument, whole)
    save(profile, data)
    return Sleeper(name, instrument, plan, profile, data, ())


def trained(kind: str, data: Path) -> Sleeper:
    """A trained model, measured on texts of its task."""
    files: list[str] = []
    for number in range(2 * TEXTS):
        path = data / f"recall-{number}.txt"
        path.write_text(recall_text(1000 + number, 2000 if number < TEXTS else 100))
        files.append(str(path))
    order = {
        "contexts": (CONTEXT,),
        "window_tokens": CONTEXT,
        "num_windows": 2 * TEXTS,
        "num_scored": 64,
        "depths": (),
        "num_chains": 0,
        "fit_texts": tuple(files[:TEXTS]),
        "eval_texts": tuple(files[TEXTS:]),
    }
    found = measured(kind, trained_model(kind), data, order)
    cut = CONTEXT - CONTEXT % ITEM
    texts = []
    for seed in range(SESSIONS):
        ids = found.instrument.encode(recall_text(seed, 64))
        texts.append((ids[:cut], ids[cut:]))
    return Sleeper(kind, found.instrument, found.plan, found.profile, data, texts)


REWRITTEN: dict[str, Callable[[Path, Path], Path]] = {
    "windowed": write_windowed,
    "narrow": partial(write_windowed, window=NARROW),
    "latent": write_latent,
}


def rewritten(
    kind: str, source: Path, data: Path, contexts: tuple[int, ...], num_windows: int
) -> Sleeper:
    """The sample model with windows or latents, measured on the usual texts."""
    folder = REWRITTEN[kind](source, data / kind)
    order = {
        "contexts": contexts,
        "num_windows": num_windows,
        "num_scored": 64,
        "depths": (0.5,),
        "num_chains": 2,
        "presets": ("dense3", "balanced", "tq4"),
    }
    found = measured(kind, folder, data, order)
    longest = max(contexts)
    texts = []
    for text in held_out_texts():
        ids = found.instrument.encode(text.content)
        if len(ids) >= longest + 64:
            texts.append((ids[:longest], ids[longest : longest + 64]))
    return Sleeper(kind, found.instrument, found.plan, found.profile, data, texts[:2])


# ---- sleeping


def sleep(of: Sleeper, codec: str, *, accept_loss: bool = False) -> dict[str, Any]:
    """Save, load and go on with every text by one codec; returns the figures."""
    settings: dict[str, Any] = {"codec": codec, "accept_loss": accept_loss, "ram_bytes": GIB}
    config = StoreConfig(disk_bytes=0, **settings)
    layout, states = of.instrument.layout, of.plan.states
    codecs = ServedCodecs(config, layout, of.instrument.fingerprint, of.data, states=states)
    codecs.compile_rest()
    windows = states.windows if states else None
    window_tokens = states.window_tokens if states else 0
    known = (of.plan.needs_state, windows, window_tokens)
    model = StoredModel(of.name, of.instrument.fingerprint, layout, *known)
    store = ColdStore(config, model, codecs.codecs, [RamTier(GIB)])
    try:
        rows = [_slept(of, store, number) for number in range(len(of.texts))]
    finally:
        store.close()
    moved = [x["drift"] for x in rows]
    return {
        "codec": codecs.report.name,
        "kl": float(np.mean(np.concatenate([x.kl for x in moved]))),
        "top1": float(np.mean(np.concatenate([x.same_top for x in moved]))),
        "right_before": _share(x["right"][0] for x in rows),
        "right_after": _share(x["right"][1] for x in rows),
        "hot_bytes": int(np.mean([x["hot_bytes"] for x in rows])),
        "cold_bytes": int(np.mean([x["cold_bytes"] for x in rows])),
    }


def _slept(of: Sleeper, store: ColdStore, number: int) -> dict[str, Any]:
    tokens, rest = of.texts[number]
    session = of.instrument.prefill(tokens)
    ref = SessionRef("benchmark", str(number), b"salt")
    chain, stored = chain_of(store, ref, tokens), len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
    states: list[StateAt] = []
    if of.plan.needs_state:
        ends = dict.fromkeys((_before_answer(len(tokens)), stored))
        states = [StateAt(x, of.instrument.prefill(tokens[:x]).state) for x in ends]
    store.save(
        ref,
        chain,
        Rows(store, session.run, states),
        states=[x.position // CHUNK_TOKENS for x in states],
        state_bytes=sum(state_nbytes(x.tree) for x in states),
    )
    assert store.flush(60), "the session was not saved in time"
    restored = store.restore(store.match(ref, chain))
    assert restored.num_tokens == stored, restored
    woken = HeldSession(restored.run, restored.num_tokens, restored.state)
    exact = of.instrument.log_probs(session, rest)
    # What follows the last full chunk is computed, as an engine does it.
    packed = of.instrument.log_probs(woken, [*tokens[stored:], *rest])[len(tokens) - stored :]
    record = store.record(ref)
    assert record is not None
    return {
        "drift": drift(exact, packed, rest[1:]),
        "right": [_answers(x, rest) for x in (exact, packed)],
        "hot_bytes": _hot_bytes(session),
        "cold_bytes": record.packed_bytes,
    }


def _before_answer(num_tokens: int) -> int:
    """Where an engine takes the older state: ``engines.mlx_worker.batch.prefill``."""
    end = num_tokens - ANSWER
    return end - end % CHUNK_TOKENS or end


def _answers(log_probs: np.ndarray, rest: Sequence[int]) -> list[bool]:
    """Say for each answer in ``rest`` whether it is the most likely token."""
    places = [x for x in answer_places(rest) if x]
    return [int(log_probs[x - 1].argmax()) == rest[x] for x in places]


def _share(found: Iterator[list[bool]]) -> float | None:
    every = [x for answers in found for x in answers]
    return float(np.mean(every)) if every else None


def _hot_bytes(session: HeldSession) -> int:
    """Bytes of the live session in bf16; states of recurrent layers are fp32 everywhere."""
    rows = sum(2 * x.size for pair in session.run for x in pair)
    return rows + _state_bytes(session.state)


def _state_bytes(tree: StateTree) -> int:
    if isinstance(tree, StateArray):
        wide = type(tree).__name__ == "MatrixArray"
        return int(tree.array.size) * (4 if wide else 2)
    if isinstance(tree, dict):
        return sum(_state_bytes(x) for x in tree.values())
    return sum(map(_state_bytes, tree)) if isinstance(tree, list | tuple) else 0


# ---- the table


def figures(of: Sleeper) -> dict[str, Any]:
    """All figures of one model: the gate's findings, its choice, and the cost of a sleep."""
    rows = [
        {"preset": x.preset, "context": x.context, "bits": x.bits_per_element, "kl": x.kl}
        | {"top1": x.top1, "chain_kl": x.chain_kl}
        for x in of.profile.rows
    ]
    chosen = sleep(of, "auto")
    found = {"model": of.name, "gate": rows, "auto": chosen}
    states = of.plan.states
    if states is not None and states.has_matrices:
        rows_codec = chosen["codec"].partition("+")[0]
        found["state4"] = sleep(of, f"{rows_codec}+state4", accept_loss=True)
    return found


def as_text(found: dict[str, Any]) -> Iterator[str]:
    yield f"## {found['model']}"
    yield ""
    yield "| preset | tokens | bits | KL | top 1 | KL of chains |"
    yield "|---|---:|---:|---:|---:|---:|"
    for x in found["gate"]:
        chains = "" if x["chain_kl"] is None else f"{x['chain_kl']:.4f}"
        yield (
            f"| `{x['preset']}` | {x['context']} | {x['bits']:.2f} | {x['kl']:.5f} |"
            f" {x['top1']:.1%} | {chains} |"
        )
    yield ""
    for name in ("auto", "state4"):
        if (x := found.get(name)) is not None:
            answers = ""
            if x["right_before"] is not None:
                answers = (
                    f", right answers {x['right_before']:.2%} before, {x['right_after']:.2%} after"
                )
            yield (
                f"{name}: `{x['codec']}`, KL {x['kl']:.5f}, same top {x['top1']:.1%}{answers};"
                f" {x['hot_bytes']:,} bytes live, {x['cold_bytes']:,} asleep"
                f" ({x['hot_bytes'] / x['cold_bytes']:.2f}x)"
            )
    yield ""


def main() -> None:
    begin_with_blas("benchmarks.families.figures")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mamba2,delta")
    parser.add_argument("--source", type=Path, help="the sample model, for all but trained ones")
    parser.add_argument("--contexts", default="2048", help="in tokens, of these")
    parser.add_argument("--windows", type=int, default=16, help="to learn from, of these")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    results = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if name in REWRITTEN:
                contexts = tuple(map(int, args.contexts.split(",")))
                of = rewritten(name, args.source, Path(folder), contexts, args.windows)
            else:
                of = trained(name, Path(folder))
            results.append(figures(of))
        print("\n".join(as_text(results[-1])), flush=True)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
