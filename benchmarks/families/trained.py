"""Tiny models of the recurrent families, trained on recall until they know it.

    python -m benchmarks.families.trained [--kinds delta,mamba2] [--folder FOLDER]

    delta    a gated delta net under a layer of attention (qwen3_next), which is muted, so that the
             state has to carry everything
    mamba2   two layers of Mamba-2, and no attention at all

Trained with mlx on the CPU, in minutes each. A folder is named by a digest of the task and of how
the model is trained on it, so that is done once. They are ordinary folders of models, which any
engine can load.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import shutil
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.families import tasks
from benchmarks.families.fast_blas import begin_with_blas

logger = logging.getLogger(__name__)

FOLDER: Final = Path.home() / ".cache" / "thermocline" / "trained"
NUM_TOKENS: Final = {"delta": 96}  # a delta net goes through a text one token at a time
USUAL_TOKENS: Final = 192
BATCH: Final = 8
MOST_STEPS: Final = 3000
EVERY: Final = 50  # steps between two looks at what it knows
ENOUGH: Final = 0.99  # of the answers; fewer than 95 % would be no model to measure anything on
RATE: Final = 3e-3
OTHERS: Final = 0.2  # weight of symbols that are no answers
SEED: Final = 1
FORGETS: Final = -5.0  # of a delta net at first: the logarithm of how fast

_COMMON: Final[dict[str, object]] = {
    "vocab_size": len(tasks.ALPHABET),
    "hidden_size": 64,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
_DELTA: Final[dict[str, object]] = {
    **_COMMON,
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [0, 1],
    "moe_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
    "norm_topk_prob": True,
}
CONFIGS: Final[dict[str, dict[str, object]]] = {
    "delta": _DELTA,
    "mamba2": {
        **_COMMON,
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 32,
        "layer_norm_epsilon": 1e-5,
        "expand": 1,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
}


def trained_model(kind: str, folder: Path = FOLDER) -> Path:
    """Return the folder of a trained model; trains it first if that was not done yet.

    Raises:
        RuntimeError: it did not learn the task.
    """
    place = folder / f"{kind}-{_digest(kind)}"
    if not (place / "config.json").exists():
        unfinished = folder / f"{place.name}.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(_train(kind), CONFIGS[kind], unfinished)
        unfinished.rename(place)
    return place


def _digest(kind: str) -> str:
    how = (CONFIGS[kind], _num_tokens(kind), BATCH, MOST_STEPS, ENOUGH, RATE, OTHERS, SEED)
    digest = blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=6)
    digest.update(Path(tasks.__file__).read_bytes())
    return digest.hexdigest()


def _num_tokens(kind: str) -> int:
    return NUM_TOKENS.get(kind, USUAL_TOKENS)


def new_model(kind: str) -> Any:
    """Make the model before it has learned anything, the same weights every time."""
    mx.random.seed(SEED)
    config = CONFIGS[kind]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: Any = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)
    if kind == "delta":
        # Fresh ones forget within a few tokens, and would take long to learn not to.
        decay = model.layers[0].linear_attn.A_log
        model.layers[0].linear_attn.A_log = mx.full(decay.shape, FORGETS)
        muted = model.layers[-1].self_attn.o_proj
        muted.weight = mx.zeros_like(muted.weight)
        muted.freeze()
    mx.eval(model.parameters())
    return model


def _train(kind: str) -> Any:
    model, rng, began = new_model(kind), np.random.default_rng(SEED), time.monotonic()
    warm = optim.linear_schedule(0, RATE, 100)
    rate = optim.join_schedules([warm, optim.cosine_decay(RATE, MOST_STEPS)], [100])
    optimizer = optim.AdamW(rate, weight_decay=0.01)
    step = nn.value_and_grad(model, _loss)  # type: ignore[attr-defined]
    for number in range(1, MOST_STEPS + 1):
        model.train()
        ids = mx.array(tasks.recall_batch(rng, BATCH, _num_tokens(kind)))
        loss, gradients = step(model, ids)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        if number % EVERY == 0:
            known = _accuracy(model, np.random.default_rng(SEED + 1), _num_tokens(kind))
            took = time.monotonic() - began
            logger.info(
                "%s: step %d, %.0f s, loss %.3f, knows %.4f", kind, number, took, loss, known
            )
            if known >= ENOUGH:
                return model
    if known < 0.95:
        raise RuntimeError(f"{kind} knows only {known:.1%} of the answers after {MOST_STEPS} steps")
    return model


def _loss(model: Any, ids: mx.array) -> mx.array:
    losses = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
    weights = mx.where(_is_answer(ids)[:, 1:], 1.0, OTHERS)
    return (losses * weights).sum() / weights.sum()


def _is_answer(ids: mx.array) -> mx.array:
    """Mark the answers among the symbols, bool (batch, tokens)."""
    asked = ids == tasks.ALPHABET.index(tasks.ASK)
    nothing = mx.zeros((ids.shape[0], tasks.ITEM - 1), mx.bool_)
    return mx.concatenate([nothing, asked[:, : 1 - tasks.ITEM]], axis=1)


def _accuracy(model: Any, rng: np.random.Generator, num_tokens: int) -> float:
    model.eval()
    ids = mx.array(tasks.recall_batch(rng, 4 * BATCH, num_tokens))
    right = model(ids[:, :-1]).argmax(-1) == ids[:, 1:]
    answers = _is_answer(ids)[:, 1:]
    known, asked = (right * answers).sum().item(), answers.sum().item()
    assert isinstance(known, int) and isinstance(asked, int)
    return known / asked


def _write(model: Any, config: dict[str, object], folder: Path) -> None:
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    symbols = {x: i for i, x in enumerate(tasks.ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(symbols, unk_token=tasks.BIND))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    whole.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    begin_with_blas("benchmarks.families.trained")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(CONFIGS))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for kind in args.kinds.split(","):
        print(kind, trained_model(kind, args.folder), flush=True)


if __name__ == "__main__":
    main()
