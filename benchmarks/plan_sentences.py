"""Writes a table of docs/bench.md: the ``thermocline plan`` of four models on five machines.

Computed, not measured: from the fields of published config.json files that determine caches and
weights, with weights of 4 bits (gpt-oss's as published) and the smallest disk that each machine is
sold with.

    python benchmarks/plan_sentences.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.unit.launch.plan.published import GEMMA3_27B, GPT_OSS_20B, QWEN3_32B, QWEN35_35B

MXFP4: Final = {"quantization_config": {"quant_method": "mxfp4"}}
LENGTHS: Final = (8192, 131_072)
MACHINES: Final = {
    "GB10 (DGX Spark), 128 GB unified": "GB10, 1 TB disk",
    "GPU of 48 GB, 128 GB of memory": "RTX 6000 Ada, 48 GB",
    "GPU of 96 GB, 256 GB of memory": "RTX PRO 6000, 96 GB",
    "Mac, 64 GB unified": "Mac, 64 GB",
    "Mac, 128 GB unified": "Mac, 128 GB",
}


def models() -> dict[str, dict[str, Any]]:
    """Return the config.json of each model, with the fields that determine its weights."""
    qwen35, gemma = dict(QWEN35_35B["text_config"]), dict(GEMMA3_27B["text_config"])
    qwen35 |= {"num_experts": 256, "moe_intermediate_size": 512, "vocab_size": 248_320}
    qwen35 |= {"shared_expert_intermediate_size": 512}
    gemma |= {"intermediate_size": 21_504, "vocab_size": 262_208}
    oss = {"num_hidden_layers": 36, "num_local_experts": 128, "intermediate_size": 2880}
    layers = GPT_OSS_20B["layer_types"][:2] * 18
    return {
        "Qwen3-32B": {**QWEN3_32B, "intermediate_size": 25_600, "vocab_size": 151_936},
        "Qwen3.5-35B-A3B": {**QWEN35_35B, "text_config": qwen35, "vocab_size": 248_320},
        "Gemma 3 27B": {**GEMMA3_27B, "text_config": gemma, "vocab_size": 262_208},
        "gpt-oss-120b": {
            **{x: y for x, y in GPT_OSS_20B.items() if not x.startswith(("num_experts", "moe_"))},
            **oss,
            **MXFP4,
            "layer_types": layers,
            "vocab_size": 201_088,
        },
    }


def rows() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield each model and length, with the plan of each machine by its name."""
    with tempfile.TemporaryDirectory() as folder:
        for name, config in models().items():
            path = Path(folder) / name.replace(" ", "-")
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config))
            bits = [] if "quantization_config" in config else ["--bits", "4"]
            lengths = ",".join(map(str, LENGTHS))
            asked = ["plan", str(path), "--machines", *bits, "--context", lengths, "--json"]
            done = subprocess.run(
                [sys.executable, "-m", "launch", *asked], capture_output=True, text=True, check=True
            )
            found = json.loads(done.stdout)
            for length in LENGTHS:
                yield name, length, {x["machine"]: x for x in found if x["context"] == length}


def sentence(row: dict[str, Any]) -> str:
    """Return in words how many sessions stay alive, and how many would without sleep."""
    if row["refused"]:
        return str(row["refused"])
    alive = max(row[x] for x in ("hot", "ram", "disk"))
    return f"{alive:,} instead of {row['hot_only']:,}"


def markdown() -> Iterator[str]:
    yield "| model | tokens | " + " | ".join(MACHINES.values()) + " |"
    yield "|---|---:|" + "---|" * len(MACHINES)
    before = ""
    for name, length, found in rows():
        weights = found[next(iter(MACHINES))]["weights_bytes"] / 2**30
        first = f"{name}, {weights:.0f} GiB of weights" if name != before else ""
        before = name
        cells = [sentence(found[x]) for x in MACHINES]
        yield f"| {first} | {length:,} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(markdown()))
