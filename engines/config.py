"""The settings of an engine, and the order for a measurement with its report.

Settings and orders are frozen; only ``launch`` composes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from kvstore.codecs.quality import Quality
from kvstore.config import StoreConfig

Positive = Annotated[int, msgspec.Meta(ge=1)]

# Exit code of an engine process that cannot serve with its settings (EX_CONFIG of sysexits.h). The
# process has logged the reason in one line; the gateway does not start it again.
WRONG_SETTINGS: Final = 78
# The gateway writes this line before it closes the input of an engine process that it ends; if the
# input closes without it, the gateway has died.
LAST_LINE: Final = b"end\n"
REPORT: Final = "report.json"  # file of an ordered measurement, in the engine's runtime folder
DEPTHS: Final = (0.1, 0.5, 0.9)  # positions of needles, as fractions of the prefix
Contexts = tuple[Annotated[int, msgspec.Meta(ge=128, le=1 << 20)], ...]


def vllm_rank_folder(root: Path, rank: int) -> Path:
    """Return the folder of one vLLM worker's disk tier; every rank has its own."""
    return root / f"vllm-rank-{rank}"


class VllmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that only vLLM has; it runs in a Python environment of its own."""

    python: str = ""  # interpreter of that environment; "" = the gateway's own
    # 0 = ``CPU_BLOCK_TOKENS`` on a CPU, else vLLM's own default.
    block_tokens: Annotated[int, msgspec.Meta(ge=0, le=1024, multiple_of=16)] = 0
    tensor_parallel: Positive = 1
    args: tuple[str, ...] = ()  # vLLM arguments, passed on unchanged; they override ours


# vLLM's CPU kernels need a block size that is a multiple of this; its default of 128 leaves more
# tokens in an unfinished last block.
CPU_BLOCK_TOKENS: Final = 32

# The gateway admits one turn beyond ``max_batch`` for a tenant that has nothing running
# (``scheduler.admission``); the engine keeps a place for it.
SPARE_PLACE: Final = 1


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of any engine: its kind, its model, the memory of its live KV, its time limits."""

    kind: str = "auto"  # mlx, vllm, fake, attached, auto, or "module:Attr"
    model: str = ""  # local folder or hub id; "" = the sample model
    served_model_name: str = ""  # what clients call it; "" = the folder's or hub id's last part
    # HTTP address of an engine that was started elsewhere, to attach to; several addresses,
    # separated by spaces, are replicas. "" = start an engine.
    url: str = ""
    control: str = ""  # its control address: unix:/path or tcp://host:port; one for each url
    token: str = ""  # bearer token for both addresses, chosen where the engine was started
    # Instead of ``url`` and ``control``: the address of a list of replicas that come and go, as
    # thermocline.ray serves it; ``token`` is then derived from ``store.secret_file``.
    replica_list: str = ""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # processes, each with the whole model
    # Bytes of live KV (running requests and idle hot sessions), on all GPUs together.
    hot_bytes: Positive = 2 << 30
    max_batch: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    max_context: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0 = what the model's config says
    prefill_step: Annotated[int, msgspec.Meta(ge=16, le=8192)] = 512
    # Codec that keeps live KV packed, except its first and newest tokens; mlx only.
    hot_codec: Literal["", "tq3", "tq4"] = ""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    vllm: VllmConfig = VllmConfig()

    # Not settings; tests override them in a subclass. An engine that is silent for this long is
    # restarted. A running engine gives a sign of life every few seconds; a starting one may first
    # read weights and capture graphs, which took nine minutes for 60 GB on a GB10.
    stall_timeout_s: ClassVar[float] = 120.0
    start_timeout_s: ClassVar[float] = 1800.0


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of an engine process that we start, sent as one line of JSON on standard input.

    The pipe stays open for as long as the gateway lives; when it closes, the worker saves its
    sessions and exits. Both sockets, ``http.sock`` and ``control.sock``, lie in ``runtime_dir``
    (mode 0700).
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
    """The presets to measure on the engine's model, and the texts to measure them with."""

    presets: tuple[str, ...]
    # Presets that are measured only if the first of ``presets`` exceeds ``max_kl``.
    fallbacks: tuple[str, ...] = ()
    max_kl: Annotated[float, msgspec.Meta(ge=0)] = 0.01  # bound on the mean KL divergence, in nats
    contexts: Contexts
    fit_texts: tuple[str, ...] = ()  # files to learn from; () = those of ``corpus``
    eval_texts: tuple[str, ...] = ()  # files to evaluate on; () = those of ``corpus``
    num_windows: Positive = 48  # windows of text to learn from
    window_tokens: Annotated[int, msgspec.Meta(ge=128)] = 1024
    # Fraction of each window, at its end, whose queries show which errors in the KV before matter.
    probed_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.25
    num_scored: Positive = 256  # tokens after each prefix whose predictions are compared
    depths: tuple[float, ...] = DEPTHS  # of needles, as fractions of the prefix; () = no needles
    num_chains: Annotated[int, msgspec.Meta(ge=0)] = 4  # prefixes with reasoning problems; 0 = none
    num_threads: Annotated[int, msgspec.Meta(ge=0)] = 0  # to unpack a session; 0 = the codec's own
    # Stop once it is certain that all presets keep the bound, or that one does not.
    ends_early: bool = False
    data_path: str = ""  # where profiles, and digests of large files, are kept; "" = nowhere
    report_path: str = ""  # where the report is written; "" = nowhere

    def within(self, runtime_dir: str, data_path: str, rank: int = 0) -> CalibrationOrder:
        """Return the order with the engine's own paths: its sender must not choose where it writes.

        Args:
            rank: the vLLM worker's rank; the gateway reads only the report of rank 0.
        """
        path = Path(runtime_dir) / (f"{REPORT}.{rank}" if rank else REPORT)
        return msgspec.structs.replace(self, data_path=data_path, report_path=str(path))


class CalibrationReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The report of a measurement that a ``CalibrationOrder`` asked for."""

    fingerprint: str  # the model's fingerprint in the cold store
    engine: str
    dtype: str  # of the live cache
    rows: tuple[Quality, ...]
    profile: str = ""  # the file with the rows and the learned arrays; "" = not written
