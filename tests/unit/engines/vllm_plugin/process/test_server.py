"""Which ends of vLLM say that its settings are wrong, with a stand-in for vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.config import WRONG_SETTINGS
from engines.vllm_environment.environment import import_path
from engines.vllm_plugin.process.server import (
    FOLDER_VARIABLE,
    first_sentence,
    read_refusal,
    record_refusal,
)

REFUSED = """
from pathlib import Path
from engines.vllm_plugin.process.server import record_refusal
try:
    with record_refusal(Path({folder!r}), ValueError):
        raise ValueError("this model is not for us")
except ValueError as error:
    raise RuntimeError("Engine core initialization failed") from error
"""


def ended(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(program)
    path = ":".join(x for x in (str(folder), import_path()) if x)
    return subprocess.run(
        [sys.executable, "-m", "engines.vllm_plugin.process.server", "--model", "m"],
        env={**os.environ, "PYTHONPATH": path, FOLDER_VARIABLE: str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_flag_that_vllm_refuses_ends_as_wrong_settings(tmp_path):
    assert ended(tmp_path, "raise SystemExit(2)").returncode == WRONG_SETTINGS


def test_the_reason_of_a_refusal_is_one_line(tmp_path):
    done = ended(tmp_path, "raise ValueError('no such\\n model')")
    assert done.returncode == WRONG_SETTINGS
    assert done.stderr == "ERROR vLLM cannot serve with these settings: no such model\n"


def test_a_refusal_of_the_plug_in_in_another_process_is_reported(tmp_path):
    done = ended(tmp_path, REFUSED.format(folder=str(tmp_path)))
    assert done.returncode == WRONG_SETTINGS
    assert done.stderr.endswith("with these settings: this model is not for us\n")


def test_a_refusal_of_an_earlier_start_counts_no_more(tmp_path):
    (tmp_path / "refusal").write_text("long ago")
    done = ended(tmp_path, "raise RuntimeError('the GPU is still full')")
    assert done.returncode == 1
    assert "the GPU is still full" in done.stderr


@pytest.mark.parametrize(("program", "code"), [("", 0), ("raise SystemExit(3)", 3)])
def test_other_ends_are_passed_on(tmp_path, program, code):
    assert ended(tmp_path, program).returncode == code


def test_the_arguments_are_vllms(tmp_path):
    program = "import sys; assert sys.argv[1:] == ['--model', 'm'] and __name__ == '__main__'"
    assert ended(tmp_path, program).returncode == 0


def test_only_the_expected_error_is_written_down(tmp_path):
    with pytest.raises(KeyError), record_refusal(tmp_path, ValueError):
        raise KeyError
    assert read_refusal(tmp_path) == ""


def test_pydantics_words_are_left_out():
    words = (
        "1 validation error for ModelConfig\n"
        "  Value error, Model architectures ['X'] are not supported for now. "
        "[type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
    )
    assert first_sentence(words) == "Model architectures ['X'] are not supported for now."
