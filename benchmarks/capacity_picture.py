"""Measures and draws how many sessions stay alive by memory, with the product and without.

    python benchmarks/capacity_picture.py measure plain 80      one point: no session sleeps, 80 MiB
    python benchmarks/capacity_picture.py measure product 80    the same memory, divided
    python benchmarks/capacity_picture.py draw                  docs/pictures/capacity.png
    python benchmarks/capacity_picture.py --engine vllm draw    docs/pictures/capacity-vllm.png

Each point is ``benchmarks.users --find-capacity`` against a server: sessions are opened until some
do not come back. *plain* has all of the memory for live KV and its prefix cache; *product* gives as
much of it to live KV as one running session needs, and the rest to sleeping sessions, packed at 3
bits. ``--engine mlx``: mlx_lm, with a model that has the sample model's KV and hardly any weights,
since only sessions are counted. ``--engine vllm``: plain vLLM beside vLLM with our plug-in, and the
sample model itself. Points are kept in ``docs/pictures/capacity.json``; one that is measured again
replaces the older one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.program import options_of
from benchmarks.stacks.light_model import light_model
from benchmarks.stacks.product_stack import MIB, Stack
from benchmarks.stacks.vllm_stack import PlainVllm, with_plugin
from launch.model.find import sample_model

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
POINTS = FOLDER / "capacity.json"
PICTURES = {"mlx": FOLDER / "capacity.png", "vllm": FOLDER / "capacity-vllm.png"}
LIVE_MIB = {"mlx": 52, "vllm": 64}  # of the product's memory: one running session, somewhat more
WORDS = {"mlx": 205, "vllm": 600}
MAX_CONTEXT = 1024
SYSTEMS = {"plain": ("nothing sleeps", "#8d99ae"), "product": ("Thermocline", "#2e86ab")}


def server_of(engine: str, system: str, mib: int, folder: Path) -> Any:
    live = mib if system == "plain" else LIVE_MIB[engine]
    if engine == "mlx":
        sample = sample_model(Path.home() / ".cache" / "thermocline")
        model = light_model(sample, folder / "light")
        settings: dict[str, dict[str, Any]] = {
            "engine": {"kind": "mlx", "model": str(model), "hot_bytes": live * MIB},
            "store": {"ram_bytes": (mib - live) * MIB, "disk_bytes": 0},
            "scheduler": {"idle_after_s": 3600.0},
        }
        return Stack(settings)
    if system == "plain":
        return PlainVllm(mib * MIB, max_context=MAX_CONTEXT)
    return with_plugin(live * MIB, ram_bytes=(mib - live) * MIB, max_context=MAX_CONTEXT)


def measure(engine: str, system: str, mib: int, first: int, most: int) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(server_of(engine, system, mib, folder))
        out = folder / "found.json"
        bench = [sys.executable, "-m", "benchmarks.users", server.url]
        sizes = ["--words", str(WORDS[engine]), "--json", str(out)]
        sizes += ["--first-sessions", str(first), "--max-sessions", str(most)]
        subprocess.run([*bench, "--find-capacity", *sizes], check=True)
        keep(engine, system, mib, json.loads(out.read_text()))


def keep(engine: str, system: str, mib: int, found: dict[str, Any]) -> None:
    point = {"engine": engine, "system": system, "mib": mib}
    point |= {x: found[x] for x in ("capacity", "at_least", "prompt_tokens", "judged_by", "rounds")}
    same = (engine, system, mib)
    others = [x for x in points() if (x["engine"], x["system"], x["mib"]) != same]
    FOLDER.mkdir(parents=True, exist_ok=True)
    POINTS.write_text(json.dumps([*others, point], indent=1) + "\n")


def points() -> list[dict[str, Any]]:
    return json.loads(POINTS.read_text()) if POINTS.exists() else []


def draw(engine: str) -> None:
    from matplotlib.figure import Figure

    known = sorted((x for x in points() if x["engine"] == engine), key=lambda x: int(x["mib"]))
    budgets = sorted({int(x["mib"]) for x in known})
    figure = Figure(figsize=(1.6 + 1.8 * len(budgets), 3.4), layout="constrained")
    axes = figure.subplots()
    for number, (system, (name, color)) in enumerate(SYSTEMS.items()):
        kept = {int(x["mib"]): int(x["capacity"]) for x in known if x["system"] == system}
        places = [budgets.index(mib) + 0.4 * (number - 0.5) for mib in kept]
        bars = axes.bar(places, list(kept.values()), 0.38, color=color, label=name)
        axes.bar_label(bars, padding=2)
    tokens = max((x["prompt_tokens"] for x in known), default=0)
    axes.set(
        xlabel="memory for KV, awake and asleep",
        ylabel=f"sessions of {tokens} tokens that came back",
        xlim=(-0.6, len(budgets) - 0.4),
        ylim=(0, 1.25 * max((x["capacity"] for x in known), default=1)),
    )
    axes.set_xticks(range(len(budgets)), [f"{mib} MiB" for mib in budgets])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(PICTURES[engine], dpi=120, facecolor="white")


def main() -> None:
    options = options_of(__doc__, "--engine mlx|vllm --first 4 --most 256")
    options.add_argument("action", choices=["measure", "draw"])
    options.add_argument("system", choices=SYSTEMS, nargs="?")
    options.add_argument("mib", type=int, nargs="?")
    args = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end, too
    if args.action == "draw":
        draw(args.engine)
    else:
        measure(args.engine, args.system, args.mib, args.first, args.most)


if __name__ == "__main__":
    main()
