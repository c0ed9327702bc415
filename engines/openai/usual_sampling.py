"""The sampling that a model was made for: its ``generation_config.json``, as vLLM takes it, too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

import msgspec

from engines.openai.requests import Body, RepetitionPenalty, Share, Temperature, TopK, TopP

log = logging.getLogger("thermocline.engines")
FILE = "generation_config.json"
Asked = TypeVar("Asked", bound=Body)


class UsualSampling(msgspec.Struct, frozen=True):
    """The sampling of requests that name no other; None: the model says nothing."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None

    @classmethod
    def of(cls, folder: Path) -> UsualSampling:
        """Read a model's folder; what cannot be read or is out of bounds asks for nothing."""
        file = folder / FILE
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s is not heeded: %s", file, error)
            return cls()

    def filled_in(self, request: Asked) -> Asked:
        """Return a request with all of these that it leaves open."""
        said = {x: y for x, y in msgspec.structs.asdict(self).items() if y is not None}
        left_open = {x: y for x, y in said.items() if getattr(request, x) is None}
        return msgspec.structs.replace(request, **left_open) if left_open else request
