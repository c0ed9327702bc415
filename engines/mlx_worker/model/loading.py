"""Reads a model from disk, in the dtype this machine computes fastest.

On a Mac the weights keep their own dtype. Linux CPU builds of mlx multiply float32 a hundred times
faster than bf16 (the BLAS they call has no bf16), so there everything runs in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.utils import hf_repo_to_path

from engines.config import EngineConfig
from engines.kv_budget import UNSTATED_CONTEXT, stated_context

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer and its config. ``model`` belongs to the thread that loaded it."""

    model: Any
    tokenizer: Any
    config: Mapping[str, Any] = field(repr=False)
    path: Path | None = None  # None = built in code, without files

    @property
    def max_context(self) -> int:
        """Longest context the model was made for, prompt and answer together, in tokens."""
        return stated_context(self.config) or UNSTATED_CONTEXT

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        text = self.config.get("text_config") or self.config
        return int(text["vocab_size"])


def load_model(model_path: str, dtype: str = "auto") -> LoadedModel:
    """Load from a local folder or the hub. Call it on the thread that will run the model.

    Raises:
        OSError, ValueError: no such model, or mlx_lm does not know its architecture.
    """
    loaded: Any = load(model_path, lazy=True, return_config=True)
    model, tokenizer, config = loaded
    # Cast before the first evaluation, so that two copies of the weights never coexist.
    if (wanted := chosen_dtype(dtype)) is not None:
        model.set_dtype(_DTYPES[wanted])
    mx.eval(model.parameters())
    return LoadedModel(model, tokenizer, config, model_folder(model_path))


def model_folder(model_path: str) -> Path:
    """The folder of a model's files; a hub id must have been downloaded before."""
    path = Path(model_path)
    return path if path.exists() else Path(hf_repo_to_path(model_path))  # type: ignore[no-untyped-call]


def chosen_dtype(setting: str) -> str | None:
    """The dtype to cast to; ``None`` = the model's own."""
    if setting != "auto":
        return setting
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return "float32" if on_cpu else None


def describe_device(engine: EngineConfig) -> str:
    """The device and the dtype that the model runs in, for the log."""
    return f"mlx on {mx.default_device()}, dtype {chosen_dtype(engine.dtype) or 'of the model'}"
