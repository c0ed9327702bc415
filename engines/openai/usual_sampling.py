"""The sampling that a model was made for: its ``generation_config.json``, as vLLM takes it, too."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from engines.openai.requests import Body, RepetitionPenalty, Share, Temperature, TopK, TopP

log = logging.getLogger("thermocline.engines")
FILE = "generation_config.json"
MOST_BYTES: Final = 1 << 20
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
        """Read a model's folder; a value that is missing or out of bounds asks for nothing."""
        file = folder / FILE
        try:
            with file.open("rb") as opened:
                content = opened.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            said = json.loads(content)
            if not isinstance(said, dict):
                raise ValueError("it is no object")
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is not heeded: %s", file, error)
            return cls()
        good = {}
        for field in msgspec.structs.fields(cls):
            value = said.get(field.name)
            if field.name == "top_k" and isinstance(value, float) and value.is_integer():
                value = int(value)
            try:
                good[field.name] = msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                log.warning("%s of %s is not heeded: %s", field.name, file, error)
        return cls(**good)

    def filled_in(self, request: Asked) -> Asked:
        """Return a request with all of these that it leaves open."""
        said = {x: y for x, y in msgspec.structs.asdict(self).items() if y is not None}
        left_open = {x: y for x, y in said.items() if getattr(request, x) is None}
        return msgspec.structs.replace(request, **left_open) if left_open else request
