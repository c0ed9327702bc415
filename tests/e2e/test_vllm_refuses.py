"""``thermocline serve --engine vllm`` with settings that cannot be followed: one sentence, an end.

It is vLLM that refuses, or the plug-in in one of vLLM's processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.command_line import thermocline_apart
from tests.e2e.conftest import python_with_vllm
from tests.fields import fields

# In CI tests/vllm/start/test_support.py asks the plug-in itself.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]

PYTHON = python_with_vllm()

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    **fields(
        "model_type=llama hidden_size=64 intermediate_size=64 num_hidden_layers=1",
        "num_attention_heads=1 num_key_value_heads=1 head_dim=64 vocab_size=32",
        "max_position_embeddings=512 torch_dtype=float32",
    ),
}
# vLLM makes them up; no test reads an answer of this model.
NO_WEIGHTS = ("--load-format", "dummy", "--skip-tokenizer-init")


def refused(folder: Path, config: dict[str, object], *args: str) -> tuple[int, str, str]:
    """The exit code, the one line that says why, and the whole log."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, model / "model.safetensors")
    words = ["--engine", "vllm", "--model", str(model), "--port", "0", "--hot", "64MiB"]
    words += ["--ram", "64MiB", "--disk", "64MiB", "--data-dir", str(folder / "data")]
    variables = {"THERMOCLINE_ENGINE__VLLM__PYTHON": PYTHON}
    variables["THERMOCLINE_ENGINE__VLLM__ARGS"] = ",".join(args)
    done = thermocline_apart("serve", *words, variables=variables, timeout=600)
    assert "starting it again" not in done.stderr, done.stderr
    why = [x for x in done.stderr.splitlines() if "cannot serve with these settings" in x]
    assert len(why) == 1, done.stderr
    return done.returncode, why[0], done.stderr


def test_a_kind_of_model_that_vllm_does_not_know(tmp_path):
    code, why, _ = refused(tmp_path, LLAMA | {"architectures": ["NeverHeardOf"]}, *NO_WEIGHTS)
    assert code == 1
    assert "NeverHeardOf" in why and "not supported" in why


def test_a_flag_that_vllm_does_not_have(tmp_path):
    code, why, log = refused(tmp_path, LLAMA, "--no-such-flag")
    assert code == 1
    assert "look at engine.vllm.args" in why
    assert "unrecognized arguments: --no-such-flag" in log


def test_what_the_plug_in_refuses_inside_of_vllm(tmp_path):
    code, why, _ = refused(tmp_path, LLAMA, *NO_WEIGHTS, "--no-enable-prefix-caching")
    assert code == 1
    assert "leave prefix caching on" in why
