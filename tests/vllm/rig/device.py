"""Whether vLLM can run a model here."""

from __future__ import annotations

import pytest


def runs_models() -> bool:
    """Return whether there is a device for vLLM's CUDA build; the one for CPUs needs none."""
    import torch

    return torch.version.cuda is None or torch.cuda.is_available()


def skip_without_device() -> None:
    """Skip a test that runs a model where nothing can."""
    if not runs_models():
        pytest.skip("vLLM's CUDA build runs no model without a device")
