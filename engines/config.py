"""Settings of an engine, the order of a measurement and its report.

Settings and order are frozen, and composed only by ``launch``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from kvstore.codecs.quality import Quality
from kvstore.config import StoreConfig

Positive = Annotated[int, msgspec.Meta(ge=1)]

# Exit code of an engine process that cannot serve with its settings. It has logged the reason in
# one line, and is not started again. (EX_CONFIG of sysexits.h.)
WRONG_SETTINGS: Final = 78
# A gateway that ends an engine process writes this before it closes the process's input; a gateway
# that dies writes nothing.
LAST_LINE: Final = b"end\n"
REPORT: Final = "report.json"  # of a measurement by order, in the engine's runtime folder
DEPTHS: Final = (0.1, 0.5, 0.9)  # positions of needles, as shares of the prefix
Contexts = tuple[Annotated[int, msgspec.Meta(ge=128, le=1 << 20)], ...]


def vllm_rank_folder(root: Path, rank: int) -> Path:
    """Return the folder of one vLLM worker's disk tier; every rank has its own."""
    return root / f"vllm-rank-{rank}"


class VllmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of vLLM alone, which lives in an environment of its own."""

    python: str = ""  # interpreter of that environment; "" = the gateway's own
    # 0 = 32 on CPU, else vLLM's own.
    block_tokens: Annotated[int, msgspec.Meta(ge=0, le=1024, multiple_of=16)] = 0
    tensor_parallel: Positive = 1
    args: tuple[str, ...] = ()  # passed on to vLLM as they are, in the place of ours


# The CPU kernels need a multiple of it; vLLM's default of 128 wastes tails.
CPU_BLOCK_TOKENS: Final = 32

# The gateway lets one turn of a tenant with nothing running in beyond ``max_batch``
# (``scheduler.admission``); the engine has a place for it.
SPARE_PLACE: Final = 1


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of any engine: its kind, its model, the memory of its live KV, its time limits."""

    kind: str = "auto"  # mlx, vllm, fake, attached, auto, or "module:Attr"
    model: str = ""  # local folder or hub id; "" = the sample model
    served_model_name: str = ""  # what clients call it; "" = the folder's or hub id's last part
    # Attach to an engine started elsewhere instead of starting one; several, with spaces between,
    # are replicas.
    url: str = ""
    control: str = ""  # its control address: unix:/path or tcp://host:port; one for each url
    token: str = ""  # bearer token of both, chosen where it was started
    # Instead of both: the address of a list of replicas that come and go, as thermocline.ray serves
    # it; ``token`` then follows from ``store.secret_file``.
    replica_list: str = ""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # processes, each with the whole model
    # Live KV: running requests and idle sessions that are still hot; on all GPUs together.
    hot_bytes: Positive = 2 << 30
    max_batch: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    max_context: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0 = what the model's config says
    prefill_step: Annotated[int, msgspec.Meta(ge=16, le=8192)] = 512
    # Keep live KV packed by this codec, all but its first and newest tokens; mlx only.
    hot_codec: Literal["", "tq3", "tq4"] = ""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    vllm: VllmConfig = VllmConfig()

    # No settings: tests have others, in a subclass. An engine that says nothing for this long is
    # started again; one that runs says every few seconds that it lives, and one that starts may
    # read weights and capture graphs first: 60 GB took a GB10 nine minutes.
    stall_timeout_s: ClassVar[float] = 120.0
    start_timeout_s: ClassVar[float] = 1800.0


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine process of ours, sent to it as one line of JSON on standard input.

    The pipe stays open for as long as the gateway lives; at its end the worker saves what it
    holds and exits. Both sockets, ``http.sock`` and ``control.sock``, lie in ``runtime_dir`` (mode
    0700).
    """

    engine: EngineConfig
    store: StoreConfig
    model_path: str
    served_model_name: str
    runtime_dir: str
    token: str  # bearer token of both sockets
    data_path: str = ""  # where profiles of models lie; "" = beside the disk tier
    log_level: str = "info"


class CalibrationOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The presets to measure on the engine's model, and the texts to do it with."""

    presets: tuple[str, ...]
    # Measured only if the first of ``presets`` does not keep the bound of ``max_kl``.
    fallbacks: tuple[str, ...] = ()
    max_kl: Annotated[float, msgspec.Meta(ge=0)] = 0.01
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
    num_threads: Annotated[int, msgspec.Meta(ge=0)] = 0  # that unpack a session; 0 = the codec's
    # Stop at the first case after which all presets surely keep the bound, or one surely does not.
    ends_early: bool = False
    data_path: str = ""  # where profiles, and digests of large files, are kept; "" = nowhere
    report_path: str = ""  # where the report is written; "" = nowhere

    def within(self, runtime_dir: str, data_path: str, rank: int = 0) -> CalibrationOrder:
        """Return the order with an engine's own paths: a peer must not choose what it writes to.

        ``rank``: of vLLM's workers; the report of the first is the one that is awaited.
        """
        path = Path(runtime_dir) / (f"{REPORT}.{rank}" if rank else REPORT)
        return msgspec.structs.replace(self, data_path=data_path, report_path=str(path))


class CalibrationReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The report of a measurement; see ``engines.config.CalibrationOrder``."""

    fingerprint: str  # of the model, as its cold store names it
    engine: str
    dtype: str  # of the live cache
    rows: tuple[Quality, ...]
    profile: str = ""  # the file with the rows and the learned arrays; "" = nowhere
