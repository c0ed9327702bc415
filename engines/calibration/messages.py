"""The order to the calibration program and its report: one line of JSON each."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from engines.calibration.measuring.cases import DEPTHS
from engines.config import Positive, VllmConfig
from kvstore.codecs.quality import Quality

Contexts = tuple[Annotated[int, msgspec.Meta(ge=128, le=1 << 20)], ...]


class CalibrationOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model to measure, the presets, and the texts to do it with."""

    model_path: str
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    vllm: VllmConfig = VllmConfig()  # for vLLM: the same as for serving
    presets: tuple[str, ...]
    # Measured only if the first of ``presets`` does not keep the bound of ``max_kl``.
    fallbacks: tuple[str, ...] = ()
    max_kl: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    codec_modules: tuple[str, ...] = ()  # see ``StoreConfig``
    contexts: Contexts
    fit_texts: tuple[str, ...] = ()  # files to learn from; none = those of ``corpus``
    eval_texts: tuple[str, ...] = ()  # files to judge by; none = those of ``corpus``
    num_windows: Positive = 48  # to learn from
    window_tokens: Annotated[int, msgspec.Meta(ge=128)] = 1024
    # Of each window: what its end makes of the KV before says which errors matter.
    probed_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.25
    num_scored: Positive = 256  # tokens after each prefix that are compared
    depths: tuple[float, ...] = DEPTHS  # of needles, as shares of the prefix; none = no needles
    num_chains: Annotated[int, msgspec.Meta(ge=0)] = 4  # prefixes with problems; 0 = none
    chunk_tokens: Positive = 128  # of the cold store
    num_threads: Annotated[int, msgspec.Meta(ge=0)] = 0  # that unpack a session; 0 = the codec's
    with_bounds: bool = True  # compute the bounds of theory, too; takes as long as learning
    data_path: str = ""  # where profiles, and digests of large files, are kept; "" = nowhere
    log_level: str = "info"


class WaterFilling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The bound of any transform over a scope, by the spectra of the samples (water-filling).

    Entry i of both tuples is a point of the curve: the least bits per element, gains not counted,
    for that residual error.
    """

    scope: str
    bits: tuple[float, ...]
    residual_errors: tuple[float, ...]


class CalibrationReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The answer to an order."""

    fingerprint: str  # of the model, as its cold store names it
    engine: str
    dtype: str  # of the live cache
    rows: tuple[Quality, ...]
    bounds: tuple[WaterFilling, ...] = ()  # empty if nothing had to be learned
    profile: str = ""  # the file with the rows and the learned arrays; "" = nowhere
