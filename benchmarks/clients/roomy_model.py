"""The sample model with a longer context and one layer.

Agents' first prompts have 10,000 to 30,000 tokens, more than the sample model's whole context. Only
the wire is judged, so a model that reads them fast will do, whatever it answers. It would not stop
by itself, so many of its tokens end an answer.
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
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def sample_folder() -> Path:
    command = [sys.executable, "-m", "launch.sample.sample_model"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def roomy_model(folder: Path, end_every: int = 5) -> Path:
    """Make the model in ``folder``, unless it is there; returns ``folder``.

    ``end_every``: one in so many tokens ends an answer.
    """
    import mlx.core as mx

    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    sample = sample_folder()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(sample / "tokenizer.json", folder)
    ends: dict[str, Any] = {"eos_token_id": list(range(2, 49_000, end_every))}
    _change(sample, folder, "generation_config.json", ends)
    shape = {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": CONTEXT}
    _change(sample, folder, "config.json", {**shape, **ends})
    _change(sample, folder, "tokenizer_config.json", {"model_max_length": CONTEXT})
    arrays = mx.load(str(sample / "model.safetensors"))
    assert isinstance(arrays, dict)
    mx.save_safetensors(str(weights), {k: v for k, v in arrays.items() if _is_kept(k)})
    return folder


def _change(source: Path, target: Path, name: str, changed: dict[str, Any]) -> None:
    content = json.loads((source / name).read_text())
    (target / name).write_text(json.dumps({**content, **changed}, indent=2))


def _is_kept(name: str) -> bool:
    layer = _LAYER.search(name)
    return layer is None or int(layer.group(1)) < NUM_LAYERS


if __name__ == "__main__":
    print(roomy_model(Path(sys.argv[1])))
