"""Measures the loss of every codec, ours and the literature's, on the sample model.

It measures as ``thermocline calibrate`` does, in a real engine's cache, with all bytes counted: the
model's predictions after a held-out prefix are compared with those after the exact cache. vLLM is
used where it is installed: it reads prompts several times as fast as mlx does on a CPU.

    python benchmarks/quality.py [--engine vllm|mlx] [--model M] [--dtype bfloat16] [--presets ours]
        [--contexts 2048,6144] [--folder F] [--json OUT] [--markdown OUT.md] [--plot OUT.png]

With ``--folder`` the profile is kept there, and another run with other presets adds to it. The last
line is the codec that ``auto`` would choose by that profile.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.program import arguments, table
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

LEAST_KL = 1e-5  # smaller ones are rounding errors
HEAD = (
    *("preset", "tokens", "bits", "ratio", "KL", "perplexity", "delta p", "top 1", "needles"),
    *("KL of chains", "top 1 of chains", "restore / prefill", "cos K / V"),
)


def main() -> None:
    engines = "vllm|mlx" if find_python("") else "mlx|vllm"
    args = arguments(
        __doc__,
        f"--engine {engines} --model '' --python '' --dtype '' --presets all --contexts"
        f" {USUAL_CONTEXTS} --folder PATH --markdown PATH --plot PATH",
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        report = _measured(args, args.folder or Path(temporary))
        choice = _choice(Path(report.profile))
    RowPrinter().print_report(report)
    text = f"{markdown(report, time.monotonic() - started)}\n{choice}\n"
    print("", text, sep="\n")
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        write_json(report, args.json)
    if args.plot:
        draw(report.rows, args.plot)


def draw(rows: Sequence[Quality], path: Path) -> None:
    """Draw KL over bits, a line for each context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    for context in sorted({x.context for x in rows}):
        shown = [x for x in rows if x.context == context]
        points = [(x.bits_per_element, max(x.kl, LEAST_KL)) for x in shown]
        axes.scatter(*zip(*points, strict=True), label=f"{context} tokens")
        for row, point in zip(shown, points, strict=True):
            axes.annotate(row.preset, point, (5, 0), textcoords="offset points", fontsize=7.5)
    axes.set(xlabel="bits a value, everything counted", ylabel="KL, nats", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def _measured(args: argparse.Namespace, folder: Path) -> CalibrationReport:
    assignments = [f"data_dir={folder}", f"engine.kind={args.engine}"]
    assignments += [f"engine.dtype={args.dtype}"] if args.dtype else []
    assignments += [f"engine.vllm.python={args.python}"] if args.python else []
    flags = {"--model": args.model} if args.model else {}
    wishes = CalibrateOptions((), (), args.presets, args.contexts)
    found = layers(os.environ, assignments=assignments, flags=flags)
    try:
        return calibrate(effective_settings(found, os.environ), wishes, os.environ)
    except (LaunchError, UsageError) as error:
        raise SystemExit(f"error: {error}") from error


def _choice(path: Path) -> str:
    """Return the codec that ``auto`` chooses by the profile in this file, and the reason."""
    profile = load_profile(path)
    return f"auto: {choose(AUTO, StoreConfig(), profile.layout, profile).why}"


def markdown(report: CalibrationReport, seconds: float) -> str:
    """Return three tables: of all texts, of each kind of text, and of each kind of problem."""
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
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    yield from (f"`{row.preset}`", str(row.context), cell(row.bits_per_element, ".3f"))
    yield from (f"{16 / row.bits_per_element:.2f}x", cell(row.kl, ".5f"))
    yield from (f"{row.perplexity_change_pct:+.2f} %", cell(row.delta_p, ".2%"))
    yield from (cell(row.top1, ".1%"), f"{row.needle_found}/{row.needle_total}")
    yield from (cell(row.chain_kl, ".4f"), cell(row.chain_top1, ".1%"))
    yield from (cell(row.restore_share, ".1%"), f"{row.cos_k:.4f} / {row.cos_v:.4f}")


def kind(text: str) -> str:
    """Return the kind of a shipped text, with which the names of our own texts begin."""
    first, dash, _ = text.partition("-")
    return first if dash else ("manual" if text.startswith("manual") else "code")


def _kl_of(texts: Sequence[TextQuality], kinds: Sequence[str]) -> Iterator[str]:
    """Yield the mean KL of each kind; "" for kinds of which no text is long enough."""
    found: dict[str, list[float]] = defaultdict(list)
    for x in texts:
        found[kind(x.text)].append(x.kl)
    for name in kinds:
        yield f"{sum(found[name]) / len(found[name]):.5f}" if found[name] else ""


if __name__ == "__main__":
    main()
