"""The sample model with sliding windows on its first layers: a real language model with windows.

    python -m benchmarks.families.windowed FOLDER --source SAMPLE_MODEL [--window 512] [--layers 15]

Its weights are links to the sample model's; only config.json differs. Both engines know Llama
layers with windows by ``layer_types`` and ``sliding_window``, so their arithmetic is the sample
model's, except for tokens outside of a window. First layers attend to near tokens. So with windows
of 512 tokens on ten of them, as in small Gemmas, it remains a language model after 1,500 tokens
(perplexity of a chat 28.7, without windows 27.0; of German prose 36.0, without 32.6). With windows
of 128 (``NARROW``), as in gpt-oss, it has lost its German (30.3 and 61.6), since it was not trained
so: a hard test.

vLLM shares memory between groups of equally many layers, and the plug-in accepts one group of
layers that keep all tokens: for vLLM at least half of the layers need windows, ``--layers 15``.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.program import options_of

WINDOW = 512
NARROW = 128
NUM_WINDOWS = 10  # layers with a window: the first ones


def write_windowed(
    source: Path, folder: Path, window: int = WINDOW, num: int = NUM_WINDOWS
) -> Path:
    """Write into ``folder`` the model of ``source`` with windows on its first ``num`` layers.

    Returns ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        link = folder / path.name
        if path.name != "config.json" and path.is_file() and not link.exists():
            link.symlink_to(path.resolve())
    config = json.loads((source / "config.json").read_text())
    num_full = config["num_hidden_layers"] - num
    config["layer_types"] = ["sliding_attention"] * num + ["full_attention"] * num_full
    config["sliding_window"] = window
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def main() -> None:
    options = options_of(__doc__, f"--source PATH --window {WINDOW} --layers {NUM_WINDOWS}")
    options.add_argument("folder", type=Path)
    args = options.parse_args()
    print(write_windowed(args.source, args.folder, args.window, args.layers))


if __name__ == "__main__":
    main()
