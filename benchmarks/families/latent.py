"""The sample model with latents in place of keys and values: a real language model with MLA.

    python -m benchmarks.families.latent FOLDER --source SAMPLE_MODEL

Its arithmetic is the sample model's own, written as multi-head latent attention (deepseek_v3; Liu
et al., 2024). Its cache has one latent and one rotated key for each token, which all heads share:

* the rotated key is the keys of all heads side by side. A query is zero at other heads' keys. Such
  a model has one list of frequencies, so the factors of its RoPE (``longrope``) give each pair of
  the whole key the frequency that it has in its head;
* the latent is the values of all heads, of which each head's up-projection selects its own. The
  norm that such a model applies to its latent must not change them, so the latent also has a
  constant, so large that it alone determines the norm, and the norm's weights undo the division.

So latents are as wide as K and V together and save no memory: the model shows what packing costs,
not how small a model of this kind is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from benchmarks.program import options_of

ROW_STEP: Final = 8  # latents come in multiples of so many values
NORM_WEIGHT: Final = 1024.0  # undoes the norm's division; the constant is this times sqrt(rank)


def write_latent(source: Path, folder: Path) -> Path:
    """Write into ``folder`` the Llama of ``source`` as a model with latents; return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    shape = _Shape(config)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    weights: dict[str, mx.array] = {}
    for path in source.glob("*.safetensors"):
        weights |= mx.load(str(path))  # type: ignore[arg-type]
    for number in range(config["num_hidden_layers"]):
        _rewrite(weights, f"model.layers.{number}.self_attn.", shape)
    if config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    return folder


class _Shape:
    """The dimensions of a Llama, and those of the model with latents made of it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config["num_key_value_heads"])
        self.hidden = int(config["hidden_size"])
        self.dim = int(config.get("head_dim") or self.hidden // self.heads)
        self.wide = self.kv_heads * self.dim  # of all keys, or values, of a token
        self.rank = -(-(self.wide + 1) // ROW_STEP) * ROW_STEP
        self.plain = 4 * self.dim - self.wide  # of a query, not rotated; its weights are zero
        assert self.plain > 0, "queries must not be wider than four heads' keys"

    @property
    def places(self) -> np.ndarray:
        """The position of each value of all heads' keys in the rotated key, int (wide,).

        RoPE pairs a key's first half with its second, so all heads' first halves come first.
        """
        head, value = np.divmod(np.arange(self.wide), self.dim)
        half, pair = np.divmod(value, self.dim // 2)
        found: np.ndarray = half * (self.wide // 2) + head * (self.dim // 2) + pair
        return found

    def config(self) -> dict[str, Any]:
        """The configuration of the model with latents."""
        theta = self._config["rope_theta"]
        own = theta ** (np.arange(0, self.dim, 2) / self.dim)
        given = theta ** (np.arange(0, self.wide, 2) / self.wide)
        factors = (np.tile(own, self.kv_heads) / given).tolist()
        longest = self._config["max_position_embeddings"]
        kept = [
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("max_position_embeddings", "rms_norm_eps", "rope_theta", "vocab_size"),
            *("bos_token_id", "eos_token_id"),
        ]
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **{name: self._config[name] for name in kept if name in self._config},
            "num_key_value_heads": self.heads,
            "attention_bias": True,
            "kv_lora_rank": self.rank,
            "q_lora_rank": None,
            "qk_rope_head_dim": self.wide,
            "qk_nope_head_dim": self.plain,
            "v_head_dim": self.dim,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "original_max_position_embeddings": longest,
            },
        }


def _rewrite(weights: dict[str, mx.array], layer: str, shape: _Shape) -> None:
    """Replace the weights of one layer's attention."""
    query, key, value = (
        np.array(weights.pop(f"{layer}{name}_proj.weight").astype(mx.float32)) for name in "qkv"
    )
    queries = np.zeros((shape.heads, shape.plain + shape.wide, shape.hidden), np.float32)
    unfold = np.zeros((shape.heads, shape.plain + shape.dim, shape.rank), np.float32)
    places = shape.places.reshape(shape.kv_heads, shape.dim)
    for head in range(shape.heads):
        group = head * shape.kv_heads // shape.heads
        rows = query[head * shape.dim : (head + 1) * shape.dim]
        # Scores are divided by the root of a query's width, which is four times the old one.
        queries[head, shape.plain + places[group]] = 2 * rows
        unfold[head, shape.plain :, group * shape.dim : (group + 1) * shape.dim] = np.eye(shape.dim)
    folded = np.zeros((shape.rank + shape.wide, shape.hidden), np.float32)
    folded[: shape.wide] = value
    folded[shape.rank + shape.places] = key
    bias = np.zeros(shape.rank + shape.wide, np.float32)
    bias[shape.wide] = NORM_WEIGHT * shape.rank**0.5
    norm = np.zeros(shape.rank, np.float32)
    norm[: shape.wide] = NORM_WEIGHT
    found = {
        "q_proj.weight": queries.reshape(-1, shape.hidden),
        "kv_a_proj_with_mqa.weight": folded,
        "kv_a_proj_with_mqa.bias": bias,
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": unfold.reshape(-1, shape.rank),
        "o_proj.bias": np.zeros(shape.hidden, np.float32),
    }
    weights |= {f"{layer}{name}": mx.array(array) for name, array in found.items()}


def main() -> None:
    options = options_of(__doc__, "--source PATH")
    options.add_argument("folder", type=Path)
    args = options.parse_args()
    print(write_latent(args.source, args.folder))


if __name__ == "__main__":
    main()
