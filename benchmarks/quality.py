"""What every codec costs the sample model: ours and those of the literature, on held-out text.

The machinery is that of ``thermocline calibrate``, so the figures are those of a real engine's real
cache: all bytes counted, what follows a prefix judged against the exact cache. vLLM is used where
it is installed: it reads prompts several times as fast as mlx does on a CPU.

    python benchmarks/quality.py [--engine vllm|mlx] [--model M] [--dtype bfloat16] [--presets ours]
        [--contexts 2048,6144] [--folder F] [--json OUT] [--markdown OUT.md] [--plot OUT.png]

With ``--folder`` the profile is kept there, and another run with other presets adds to it. The last
line is what ``auto`` would choose by that profile.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.drawing import check_path, draw
from benchmarks.markdown import table
from engines.calibration.gate.choice import choose
from engines.config import CalibrationReport
from kvstore.codecs.profile import load_profile
from kvstore.codecs.quality import Quality, TextQuality
from kvstore.config import AUTO, StoreConfig
from launch.calibrate.program import USUAL_CONTEXTS, CalibrateOptions, calibrate
from launch.cli.calibrate import RowPrinter
from launch.cli.options import layers
from launch.errors import LaunchError, UsageError
from launch.machine.installation import find_python
from launch.printing import write_json
from launch.settings.effective_settings import effective_settings

HEAD = (
    *("preset", "tokens", "bits", "ratio", "KL", "perplexity", "delta p", "top 1", "needles"),
    *("KL of chains", "top 1 of chains", "restore / prefill", "cos K / V"),
)


def main() -> None:
    arguments = _arguments()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        report = _measured(arguments, arguments.folder or Path(temporary))
        choice = _choice(Path(report.profile))
    RowPrinter().print_report(report)
    text = markdown(report, time.monotonic() - started)
    print("", text, choice, sep="\n")
    if arguments.markdown:
        arguments.markdown.write_text(f"{text}\n{choice}\n")
    if arguments.json:
        write_json(report, arguments.json)
    if arguments.plot:
        draw(report, arguments.plot)


def _measured(arguments: argparse.Namespace, folder: Path) -> CalibrationReport:
    assignments = [f"data_dir={folder}", f"engine.kind={arguments.engine}"]
    assignments += [f"engine.dtype={arguments.dtype}"] if arguments.dtype else []
    assignments += [f"engine.vllm.python={arguments.python}"] if arguments.python else []
    flags = {"--model": arguments.model} if arguments.model else {}
    wishes = CalibrateOptions((), (), arguments.presets, arguments.contexts)
    try:
        settings = effective_settings(
            layers(os.environ, assignments=assignments, flags=flags), os.environ
        )
        return calibrate(settings, wishes, os.environ)
    except (LaunchError, UsageError) as error:
        raise SystemExit(f"error: {error}") from error


def _choice(path: Path) -> str:
    """What ``auto`` chooses by the profile in this file, and why."""
    profile = load_profile(path)
    return f"auto: {choose(AUTO, StoreConfig(), profile.layout, profile).why}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    engine = "vllm" if find_python("") else "mlx"
    parser.add_argument("--engine", choices=("vllm", "mlx"), default=engine)
    parser.add_argument("--model", help="default: the sample model")
    parser.add_argument("--python", help="interpreter of vLLM's environment")
    parser.add_argument("--dtype", help="of the model; default: engine.dtype's")
    parser.add_argument("--folder", type=Path, help="keep the profile there")
    parser.add_argument("--presets", default="all", help="names, or: ours, usual, all")
    parser.add_argument("--contexts", help=f"default: {USUAL_CONTEXTS}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.plot:
        check_path(arguments.plot)
    return arguments


def markdown(report: CalibrationReport, seconds: float) -> str:
    """Three tables: of all texts, of each kind of text, and of each kind of problem."""
    parts = [f"{report.engine}, {report.dtype}, {seconds / 60:.0f} minutes on this machine.", ""]
    parts += table(HEAD, [list(_cells(row)) for row in report.rows])
    kinds = list(dict.fromkeys(kind(x.text) for row in report.rows for x in row.texts))
    parts += ["", "KL by kind of text:", ""]
    rows = [[row.preset, str(row.context), *_kl_of(row.texts, kinds)] for row in report.rows]
    parts += table(("preset", "tokens", *kinds), rows)
    problems = list(dict.fromkeys(x.text for row in report.rows for x in row.chains))
    parts += ["", "Chains, by kind of problem: KL at the answers, and how many stay the same:", ""]
    rows = [[row.preset, str(row.context), *_answers_of(row.chains)] for row in report.rows]
    return "\n".join([*parts, *table(("preset", "tokens", *problems), rows), ""])


def _answers_of(chains: Sequence[TextQuality]) -> Iterator[str]:
    yield from (f"{x.kl:.4f}, {x.top1:.0%}" for x in chains)


def _cells(row: Quality) -> Iterator[str]:
    yield f"`{row.preset}`"
    yield str(row.context)
    yield f"{row.bits_per_element:.3f}"
    yield f"{16 / row.bits_per_element:.2f}x"
    yield f"{row.kl:.5f}"
    yield f"{row.perplexity_change_pct:+.2f} %"
    yield "" if row.delta_p is None else f"{row.delta_p:.2%}"
    yield f"{row.top1:.1%}"
    yield f"{row.needle_found}/{row.needle_total}"
    yield "" if row.chain_kl is None else f"{row.chain_kl:.4f}"
    yield "" if row.chain_top1 is None else f"{row.chain_top1:.1%}"
    yield "" if row.restore_share is None else f"{row.restore_share:.1%}"
    yield f"{row.cos_k:.4f} / {row.cos_v:.4f}"


def kind(text: str) -> str:
    """The kind of a text that ships with us; the names of written ones begin with it."""
    first, dash, _ = text.partition("-")
    return first if dash else ("manual" if text.startswith("manual") else "code")


def _kl_of(texts: Sequence[TextQuality], kinds: Sequence[str]) -> Iterator[str]:
    """The mean KL of each kind; "" for kinds of which no text is long enough."""
    found: dict[str, list[float]] = defaultdict(list)
    for x in texts:
        found[kind(x.text)].append(x.kl)
    for name in kinds:
        yield f"{sum(found[name]) / len(found[name]):.5f}" if found[name] else ""


if __name__ == "__main__":
    main()
