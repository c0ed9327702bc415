"""``thermocline calibrate``: what each codec costs this model, measured on the model itself."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engines.calibration.order import Order, Report
from engines.kv_budget import UNSTATED_CONTEXT, stated_context
from engines.vllm_env import import_path
from kvstore.chunk_size import USUAL_TOKENS
from kvstore.codecs.calibrated import CALIBRATED, LEARNABLE
from kvstore.codecs.presets import PRESETS, codec_by_name
from kvstore.codecs.quality import Quality
from kvstore.codecs.seeds import SEEDS
from kvstore.config import AUTO
from kvstore.errors import UnknownCodec
from launch.blas import find_blas
from launch.build import CHILD_ENV
from launch.effective import Effective, require_installed
from launch.errors import LaunchError, UsageError
from launch.machine import available_memory
from launch.measured import remember
from launch.model import find_model
from launch.outputs import whole_file
from launch.show import print_table

log = logging.getLogger("thermocline.launch")

USUAL_CONTEXTS = "2048,6144"
# Of the measurement at a model's first start: what ``auto`` chooses among, but for ``max``, which
# takes longer to learn than all the others together.
FIRST_PRESETS = ("dense3", "balanced", "tq4", "safe")
FIRST_CONTEXT = 1024
FIRST_SCORED = 128
FIRST_WINDOWS = 8
BEHIND_CONTEXT: Final = 512  # tokens: what is scored, and a needle's question
MOST_CONTEXT: Final = 1 << 20  # of an order
LOOKED_AT_BYTES: Final = 1 << 16  # of a text: does it begin like one?
# Where its programs are. Others are served, and measured by another engine.
_PROGRAMS = {"mlx": "engines.mlx_worker.calibrate", "vllm": "engines.vllm_plugin.calibrate"}
# What may stand for several presets.
GROUPS: Final = {"ours": (*PRESETS, *CALIBRATED), "all": (*PRESETS, *LEARNABLE, *SEEDS)}
COLUMNS: Final = (
    *("preset", "tokens", "bits", "KL", "perplexity", "top 1", "needles", "cos K", "cos V"),
    *("of Gaussian", "of bound"),
)


@dataclass(frozen=True)
class Wishes:
    """What the command line asked for, as it was written."""

    texts: Sequence[Path]
    eval_texts: Sequence[Path]
    presets: str | None  # names, or "ours", "all", separated by commas; None = ours
    contexts: str | None  # None = usual ones that the model takes
    needles: bool


def calibrate(effective: Effective, wishes: Wishes, environ: Mapping[str, str]) -> Report:
    """Measure, in a process of the engine's own. Takes minutes.

    Raises:
        UsageError, LaunchError: it cannot be done; says what to do.
    """
    command, env = program(effective, environ)
    order = order_of(effective, wishes)
    report = msgspec.json.decode(_answer(command, order, env), type=Report)
    remember(effective, report.fingerprint)
    return report


def program(
    effective: Effective, environ: Mapping[str, str]
) -> tuple[Sequence[str], Mapping[str, str]]:
    """The command that measures, and its whole environment.

    Raises:
        UsageError, LaunchError: the engine has none, or is not installed.
    """
    kind = effective.engine_kind
    if kind not in _PROGRAMS:
        raise UsageError(f"engine {kind} cannot calibrate; use --set engine.kind=mlx, or vllm")
    require_installed(effective)
    if kind == "vllm":
        python = effective.settings.engine.vllm.python or sys.executable
        env: Mapping[str, str] = _path(environ)
    else:
        blas = find_blas(environ, effective.folders.cache)
        log.info("%s", blas.message)
        python, env = sys.executable, blas.env
    return [python, "-m", _PROGRAMS[kind]], {**environ, **CHILD_ENV, **env}


def _answer(command: Sequence[str], order: Order, env: Mapping[str, str]) -> bytes:
    """Its input stays open until it has answered: the end of it is the end of the program.

    A terminal's Ctrl-C is for us alone: the program would tell where in its imports it was.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, env=env, start_new_session=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        answer = child.stdout.read()
    if child.returncode:
        raise LaunchError("the model could not be measured; the lines above say why")
    return answer


def _path(environ: Mapping[str, str]) -> Mapping[str, str]:
    """vLLM's interpreter finds our plug-in by it."""
    paths = [x for x in (import_path(), environ.get("PYTHONPATH", "")) if x]
    return {"PYTHONPATH": ":".join(paths)} if paths else {}


def order_of(effective: Effective, wishes: Wishes) -> Order:
    """Raises ``UsageError`` or ``LaunchError`` for what cannot be measured; says what to do."""
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    model.require_weights()
    for path in (*wishes.texts, *wishes.eval_texts):
        _check_text(path)
    if both := {x.resolve() for x in wishes.texts} & {x.resolve() for x in wishes.eval_texts}:
        raise UsageError(f"{both.pop()} cannot be learned from and be judged by; take another")
    order = Order(
        model_path=model.path,
        dtype=effective.settings.engine.dtype,
        vllm=effective.settings.engine.vllm,
        presets=presets_of(wishes.presets),
        contexts=_contexts(wishes.contexts, stated_context(model.config())),
        fit_texts=tuple(dict.fromkeys(str(x.resolve()) for x in wishes.texts)),
        eval_texts=tuple(dict.fromkeys(str(x.resolve()) for x in wishes.eval_texts)),
        chunk_tokens=effective.settings.store.chunk_tokens or USUAL_TOKENS,
        data_path=str(effective.folders.data),
        most_bytes=available_memory(),
        log_level=effective.settings.log_level,
    )
    return order if wishes.needles else msgspec.structs.replace(order, depths=())


def _check_text(path: Path) -> None:
    """Raises ``UsageError`` for what nobody can learn from, and nothing be judged by."""
    if not path.is_file():  # a pipe would be empty when the program comes to read it
        raise UsageError(f"{path} is no file that can be read")
    try:
        with path.open("rb") as file:
            begin = file.read(LOOKED_AT_BYTES)
    except OSError as error:
        raise UsageError(f"{path} is no file that can be read: {error.strerror}") from error
    if not begin.strip():
        raise UsageError(f"{path} is empty")
    if b"\0" in begin:
        raise UsageError(f"{path} is not text; give a file in UTF-8")


def first_order(effective: Effective) -> Order:
    """A quick one for a model at its first start: few texts, one context length.

    Raises:
        UsageError, LaunchError: there is no such model, or it takes no prompt worth packing.
    """
    settings = effective.settings
    model = find_model(settings.engine.model, effective.folders.cache)
    longest = stated_context(model.config()) or UNSTATED_CONTEXT
    context = min(FIRST_CONTEXT, (longest - FIRST_SCORED) // 128 * 128)
    if context < 128:
        raise LaunchError(f"{model.name} takes no more than {longest} tokens")
    store = settings.store
    named = [x for x in (store.codec, store.disk_codec, store.redis_codec) if x not in ("", AUTO)]
    return Order(
        model_path=model.path,
        dtype=settings.engine.dtype,
        vllm=settings.engine.vllm,
        presets=tuple(dict.fromkeys([*FIRST_PRESETS, *named])),
        contexts=(context,),
        num_windows=FIRST_WINDOWS,
        window_tokens=min(1024, context),
        num_scored=FIRST_SCORED,
        depths=(0.5,),
        with_bounds=False,  # nobody looks at them, and they cost as much as learning
        chunk_tokens=store.chunk_tokens or USUAL_TOKENS,
        data_path=str(effective.folders.data),
        log_level=settings.log_level,
    )


def presets_of(names: str | None) -> tuple[str, ...]:
    """Names, and names of groups, each preset once."""
    wanted = [x.strip() for x in ("ours" if names is None else names).split(",")]
    each = dict.fromkeys(preset for name in wanted for preset in GROUPS.get(name, (name,)))
    for name in each:
        if name in LEARNABLE:
            continue
        try:
            codec_by_name(name)
        except UnknownCodec as error:
            raise UsageError(f"--presets: {error}") from error
    return tuple(each)


def _contexts(wished: str | None, longest: int | None) -> tuple[int, ...]:
    """``longest``: that the model takes."""
    text = USUAL_CONTEXTS if wished is None else wished
    try:
        contexts = tuple(dict.fromkeys(int(x) for x in text.split(",")))
    except ValueError:
        raise UsageError(f"--contexts {text}: write numbers of tokens, such as 2048,6144") from None
    if max(contexts) > MOST_CONTEXT:
        raise UsageError(f"--contexts {text}: {MOST_CONTEXT} tokens are the most")
    if min(contexts) < 128:
        raise UsageError(f"--contexts {text}: fewer than 128 tokens are never packed")
    most = max(contexts) if longest is None else longest - BEHIND_CONTEXT
    if most < 128:
        raise UsageError(
            f"this model takes {longest} tokens; to measure it takes {128 + BEHIND_CONTEXT}"
        )
    if wished is None:
        return tuple(x for x in contexts if x <= most) or (most // 128 * 128,)
    if max(contexts) > most:
        raise UsageError(
            f"--contexts {text}: this model takes {longest} tokens, of which {BEHIND_CONTEXT} are"
            f" needed behind the context; ask for {most} at most"
        )
    return contexts


def write_json(report: Report, path: Path) -> None:
    """Raises ``LaunchError``."""
    with whole_file(path) as file:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def print_report(report: Report) -> None:
    print_table(COLUMNS, [_cells(row) for row in report.rows], right=COLUMNS[1:])
    if report.profile:
        print(f"learned: {report.profile}")


def _cells(row: Quality) -> list[str]:
    return [
        row.preset,
        str(row.context),
        f"{row.bits_per_element:.3f}",
        f"{row.kl:.5f}",
        f"{row.perplexity_change_pct:+.2f} %",
        f"{row.top1:.1%}",
        f"{row.needle_found}/{row.needle_total}",
        f"{row.cos_k:.4f}",
        f"{row.cos_v:.4f}",
        "" if row.gaussian_gap_db is None else f"{row.gaussian_gap_db:+.2f} dB",
        "" if row.above_bound_bits is None else f"{row.above_bound_bits:+.3f} bits",
    ]
