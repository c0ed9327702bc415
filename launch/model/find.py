"""Finds the model that ``--model`` names: the sample model, a local folder, or a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.pool.hub_cache import HUB_ID
from engines.vllm_environment.model_files import model_folder
from launch.errors import LaunchError, UsageError
from launch.model.sample import sample_model

_WANTED = "--model wants the folder of a model in Hugging Face's layout"


@dataclass(frozen=True)
class Model:
    """A model; ``folder`` is None for a hub id that was never downloaded: the engine fetches it."""

    path: str  # for the engine: a folder or the hub id
    name: str  # the clients' name for it, unless the settings give another
    folder: Path | None

    def config(self) -> dict[str, Any]:
        """The parsed config.json.

        Raises:
            LaunchError: the file is not here, or holds no JSON object.
        """
        if self.folder is None:
            raise LaunchError(
                f"{self.path} is not on this machine yet; download its config.json first (hf"
                f" download {self.path} config.json), or give a local folder"
            )
        file = self.folder / "config.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LaunchError(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise LaunchError(f"{file} does not hold a JSON object")
        return content

    def require_weights(self) -> None:
        """Check that a local folder has weights; for a hub id the engine fetches them.

        Raises:
            UsageError: a local folder without weights, which is enough only for a plan.
        """
        if self.path != str(self.folder) or any(Path(self.path).glob("*.safetensors")):
            return
        raise UsageError(
            f"{self.path} holds no weights (*.safetensors); {_WANTED}, with safetensors weights"
        )


def find_model(given: str, cache_dir: Path) -> Model:
    """The model that ``given`` names; "" is the sample model, converted if need be.

    Raises:
        UsageError: ``given`` is neither a model folder nor a hub id.
        LaunchError: the sample model cannot be made.
    """
    if not given:
        folder = sample_model(cache_dir)
        return Model(str(folder), folder.name, folder)
    path = Path(given).expanduser()
    if path.is_dir():
        return _local(path.resolve())
    if not HUB_ID.fullmatch(given):
        raise UsageError(
            f"{given!r} is no model: give a folder that holds config.json, or a hub id like"
            " organisation/name, or nothing for the sample model"
        )
    return Model(given, given.rpartition("/")[2], model_folder(given))


def _local(folder: Path) -> Model:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json; {_WANTED}")
    return Model(str(folder), folder.name, folder)
