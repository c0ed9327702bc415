"""The sample model with a longer context, one layer, and one answer: "Fine."

Agents' first prompts have 10,000 to 30,000 tokens, more than the sample model's whole context. Only
the form of answers matters, so a model that reads prompts fast is enough. Its layer computes keys
and values of every token, but adds nothing to the residual stream. Its head gives each token of the
answer a high logit after the one before it. So all answers are the same, short, and end.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CONTEXT = 131_072
NUM_LAYERS = 1
ANSWER = "Fine."
CERTAIN = 100.0  # the logit of the next token of the answer; others are near 0
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_ADDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def sample_folder() -> Path:
    """Return the folder of the sample model; download the model if needed."""
    command = [sys.executable, "-m", "launch.model"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def roomy_model(folder: Path) -> Path:
    """Make the model in ``folder``, unless it is there; return ``folder``."""
    import mlx.core as mx

    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    sample = sample_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(sample / name, folder)
    shape = {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": CONTEXT}
    _change(sample, folder, "config.json", {**shape, "tie_word_embeddings": False})
    _change(sample, folder, "tokenizer_config.json", {"model_max_length": CONTEXT})
    arrays = mx.load(str(sample / "model.safetensors"))
    assert isinstance(arrays, dict)
    kept = {k: v for k, v in arrays.items() if _is_kept(k)}
    kept |= {k: mx.zeros_like(v) for k, v in kept.items() if k.endswith(_ADDS)}
    kept["lm_head.weight"] = _head(kept, _answer(folder))
    mx.save_safetensors(str(weights), kept)
    return folder


def _answer(folder: Path) -> list[int]:
    """Return the token before an answer, the answer's tokens, and the end token."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return [*ids.encode("\n").ids, *ids.encode(ANSWER).ids, end]


def _head(arrays: Any, answer: list[int]) -> Any:
    import mlx.core as mx

    embeddings = arrays["model.embed_tokens.weight"].astype(mx.float32)
    head = mx.zeros_like(embeddings)
    for token, following in zip(answer, answer[1:], strict=False):
        seen = mx.fast.rms_norm(embeddings[token], arrays["model.norm.weight"], 1e-5)
        head[following] = CERTAIN * seen / mx.sum(seen * seen)
    return head.astype(arrays["model.embed_tokens.weight"].dtype)


def _change(source: Path, target: Path, name: str, changed: dict[str, Any]) -> None:
    content = json.loads((source / name).read_text())
    (target / name).write_text(json.dumps({**content, **changed}, indent=2))


def _is_kept(name: str) -> bool:
    layer = _LAYER.search(name)
    return layer is None or int(layer.group(1)) < NUM_LAYERS


if __name__ == "__main__":
    print(roomy_model(Path(sys.argv[1])))
