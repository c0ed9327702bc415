"""A model with the sample model's KV, tokenizer and layers, and hardly any weights.

Its sessions take the same bytes, live and packed, as those of the sample model; its answers are
noise. It serves to count sessions in minutes instead of an hour.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WIDTH = 72  # a multiple of the heads
NOT_COPIED = ("config.json", "model.safetensors")


def light_model(sample: Path, folder: Path, **other: Any) -> Path:
    """Write the model into ``folder``, and return ``folder``.

    ``sample``: the sample model's folder. ``other``: other fields of the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in sample.iterdir():
        if (
            file.name not in NOT_COPIED
            and not file.name.startswith(".")
            and file.suffix in (".json", ".jinja", ".txt", ".model")
        ):
            shutil.copy(file, folder / file.name)
    config = json.loads((sample / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config |= {"hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": head_dim}
    config |= {"tie_word_embeddings": True, **other}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, head_dim), folder / "model.safetensors", {"format": "pt"})
    return folder


def _weights(config: dict[str, int], head_dim: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float16)

    ones = np.ones(WIDTH, np.float16)
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    found = {"model.embed_tokens.weight": matrix(config["vocab_size"], WIDTH)}
    found["model.norm.weight"] = ones
    shapes = {"self_attn.q_proj": (queries, WIDTH), "self_attn.o_proj": (WIDTH, queries)}
    shapes |= {f"self_attn.{x}_proj": (keys, WIDTH) for x in "kv"}
    shapes |= {f"mlp.{x}_proj": (WIDTH, WIDTH) for x in ("gate", "up", "down")}
    for layer in (f"model.layers.{i}" for i in range(config["num_hidden_layers"])):
        found |= {f"{layer}.{x}_layernorm.weight": ones for x in ("input", "post_attention")}
        found |= {f"{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    return found
