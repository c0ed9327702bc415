"""Finds the layout of a model's KV, from the model or from its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from kvstore.shapes import DType, KVLayout


def layout_of(model: Any) -> KVLayout:
    """Return the dtype, heads and dimensions of the layers whose KV grow with every token.

    ``model``: a model of mlx_lm or of transformers, a transformers configuration, the contents of
    a config.json, or the path of a model's folder. A model of mlx_lm computes three tokens, and
    the layout is that of its caches. For all others it follows from the configuration
    and the model's family, and the dtype is that of the weights.

    Raises:
        ValueError: the layers cannot be packed, or the family is not known; the message says why.
        OSError: the folder has no readable config.json.
    """
    if isinstance(model, str | Path):
        model = _config_in(Path(model))
    config = getattr(model, "config", model)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping) and "model_type" in config:  # mlx's modules are mappings, too
        return _of_config(config)
    if not hasattr(model, "layers"):
        raise ValueError(
            f"no layout of a {type(model).__name__}: a model of mlx_lm or transformers, a"
            " configuration, or the folder of a model is wanted"
        )
    from thermocline.mlx import layout_of as layout_of_mlx

    return layout_of_mlx(model)


def _config_in(folder: Path) -> Any:
    """Return the contents of a folder's config.json.

    Raises:
        OSError: the file cannot be read; if it is missing, the message names the remedy.
        ValueError: the file is not JSON.
    """
    file = folder / "config.json"
    try:
        return json.loads(file.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise type(error)(
            f"there is no {file}; nothing is downloaded here: give the folder of a model, or fetch"
            f" its config.json first (hf download {folder} config.json --local-dir FOLDER)"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def _of_config(content: Mapping[str, Any]) -> KVLayout:
    from launch.families.cache_shape import NotUnderstood
    from launch.families.table import cache_shape

    try:
        layers = cache_shape(content).growing
    except NotUnderstood as error:
        raise ValueError(str(error)) from error
    text = content.get("text_config") or content
    stored = str(text.get("dtype") or text.get("torch_dtype")).removeprefix("torch.")
    dtypes: tuple[DType, ...] = get_args(DType)
    return KVLayout(next((x for x in dtypes if x == stored), "bfloat16"), layers)
