"""``thermocline calibrate`` on both engines, on one model: they measure the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engines.calibration.corpus import held_out_texts
from kvstore.codecs.profile import load_profile
from tests.command_line import thermocline_apart
from tests.e2e.conftest import python_with_vllm
from tests.integration.tiny_models import write_model

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.vllm,
    pytest.mark.mlx,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

PYTHON = python_with_vllm()

EXACT = "raw"
LEARNED = "dense3"
NUM_SCORED = 256  # tokens of the text
PRESETS = (EXACT, "tq4", "tq3", LEARNED)


def measured(folder: Path, engine: str) -> dict[str, Any]:
    out = folder / f"{engine}.json"
    words = ["--model", str(folder / "tiny"), "--eval-text", str(folder / "text.txt")]
    words += ["--contexts", "256", "--presets", ",".join(PRESETS), "--json", str(out)]
    words += ["--set", f"engine.kind={engine}"]
    variables = {"XDG_DATA_HOME": str(folder), "THERMOCLINE_ENGINE__VLLM__PYTHON": PYTHON}
    done = thermocline_apart("calibrate", *words, variables=variables)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def spread_pct(kl: float) -> float:
    """Standard deviation of the change of perplexity that small independent errors of this KL make.

    The logarithm of a token's probability then changes by a variance of 2 KL.
    """
    return 100 * math.sqrt(2 * kl / NUM_SCORED)


def test_both_engines_measure_the_same(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    write_model("llama", tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text(held_out_texts()[0].content)
    reports = [measured(tmp_path, engine) for engine in ("mlx", "vllm")]
    for report in reports:
        profile = load_profile(Path(report["profile"]))
        assert [row.preset for row in profile.rows] == list(PRESETS)
        assert profile.fingerprint == report["fingerprint"] and set(profile.learned) == {LEARNED}
    assert len({report["fingerprint"] for report in reports}) == 2
    for mlx, vllm in zip(*(report["rows"] for report in reports), strict=True):
        assert vllm["bits_per_element"] == pytest.approx(mlx["bits_per_element"], abs=1e-3)
        change = mlx["perplexity_change_pct"]
        if vllm["preset"] == LEARNED:
            # What was learned hangs on the directions that were drawn, by either in its way,
            # and a model of random numbers has few directions that matter.
            factor, perplexity = 2.5, 4 * spread_pct(mlx["kl"] + vllm["kl"])
        else:
            factor, perplexity = 1.05, 0.1
        assert mlx["kl"] / factor <= vllm["kl"] <= mlx["kl"] * factor
        assert vllm["perplexity_change_pct"] == pytest.approx(change, abs=perplexity)
        assert (vllm["kl"] == 0) == (vllm["preset"] == EXACT)
