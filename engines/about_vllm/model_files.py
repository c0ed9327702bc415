"""Reads the small files of a model that hold its family and its chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelFiles:
    """The family of a model, and its chat templates, joined; "" where there is none."""

    model_type: str = ""
    template: str = ""


def read_model_files(folder: Path | None) -> ModelFiles:
    """Read a model's folder in Hugging Face's layout; missing or unreadable parts stay empty."""
    if folder is None:
        return ModelFiles()
    config = _json(folder / "config.json")
    return ModelFiles(str(config.get("model_type") or ""), _template(folder))


def model_folder(path: str) -> Path | None:
    """The folder of a model: a local one, or the one in the hub client's cache of downloads."""
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # the engines depend on it, the gateway does not
        return None
    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _template(folder: Path) -> str:
    """The chat templates: from their own file, else from the tokenizer's settings."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        found = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several by name, one of them for tools
        return "\n".join(str(x.get("template", "")) for x in found if isinstance(x, dict))
    return found if isinstance(found, str) else ""


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
