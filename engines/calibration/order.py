"""What ``thermocline calibrate`` and the engine's process say to each other: JSON, a line each."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from engines.calibration.cases import DEPTHS
from engines.config import Positive, VllmConfig
from kvstore.codecs.quality import Quality

Contexts = tuple[Annotated[int, msgspec.Meta(ge=128, le=1 << 20)], ...]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which model is to be measured, with what."""

    model_path: str
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    vllm: VllmConfig = VllmConfig()  # for vLLM: as it is for serving
    presets: tuple[str, ...]
    contexts: Contexts
    fit_texts: tuple[str, ...] = ()  # files to learn from; none = the texts that ship with us
    eval_texts: tuple[str, ...] = ()  # files to be judged by; none = the texts that ship with us
    num_windows: Positive = 48  # to learn from
    window_tokens: Annotated[int, msgspec.Meta(ge=128)] = 1024
    num_scored: Positive = 256  # tokens behind each prefix
    depths: tuple[float, ...] = DEPTHS  # of needles, as shares of the prefix; none = no needles
    chunk_tokens: Positive = 128  # of the cold store
    with_bounds: bool = True  # what theory allows; costs as much as learning
    data_path: str = ""  # where profiles, and digests of large files, are kept; "" = nowhere
    most_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # of memory it may take; 0 = what is free
    log_level: str = "info"


class WaterFilling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The least bits per element, gains apart, of any transform over a scope, by the profile's own
    spectra; a point of the curve for each entry."""

    scope: str
    bits: tuple[float, ...]
    residual_errors: tuple[float, ...]


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The answer."""

    fingerprint: str  # of the model, as its cold store names it
    engine: str
    dtype: str  # of the live cache
    rows: tuple[Quality, ...]
    bounds: tuple[WaterFilling, ...] = ()  # empty if nothing had to be learned
    profile: str = ""  # the file with the rows and with what was learned; "" = nowhere
