"""Tests with Ray: run with the Python of the environment that has it (.venv-ray)."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray lives in an environment of its own")
pytest.importorskip("vllm", reason="Ray's environment has vLLM, too")
