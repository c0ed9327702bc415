"""Plants each defect of ``defects.toml`` in a copy of the tree, and runs the test that must fail.

    python -m tests.planted [--only TEXT] [--no-vllm] [--no-redis] [--list]

The tests run first in the copy as it is: a test that fails there proves nothing. Each defect is
then one of

    caught   its test fails
    missed   its test passes
    unsound  its test fails, or is skipped, without the defect
    stale    the text to replace is not in the file exactly once
    broken   the test could not run at all, as after a syntax error

and the exit status is 0 if all are caught. Nothing outside of the copy is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_name("defects.toml")
VLLM_PYTHON: Final = ROOT / ".venv-vllm/bin/python"
TIMEOUT_S: Final = 900.0
SOME_FAILED: Final = 1  # pytest's exit status
PLAIN: Final = "-p no:cacheprovider -q --no-header -o addopts=--import-mode=importlib"


@dataclass(frozen=True)
class Edit:
    """Replaces a text that a file has exactly once."""

    file: str
    find: str
    replace: str

    def is_stale(self, tree: Path) -> bool:
        path = tree / self.file
        return not path.is_file() or path.read_text().count(self.find) != 1

    def apply(self, tree: Path) -> None:
        path = tree / self.file
        path.write_text(path.read_text().replace(self.find, self.replace))


@dataclass(frozen=True)
class Defect:
    """One row of the table. ``case``: the row of ``docs/faults.md``; ``needs``: vllm, redis."""

    case: str
    what: str
    test: str
    edits: tuple[Edit, ...]
    needs: tuple[str, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Defect:
        edits = tuple(Edit(**x) for x in raw["edits"])
        return cls(raw["case"], raw["what"], raw["test"], edits, tuple(raw.get("needs", ())))

    def __str__(self) -> str:
        return f"{self.case}: {self.what}"


def table() -> list[Defect]:
    return [Defect.of(x) for x in tomllib.loads(TABLE.read_text())["defects"]]


def copy_tree(target: Path) -> None:
    """Copy the files that git has or would add, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: Iterable[str], on_vllm: bool, *options: str) -> int:
    """Run tests in the copy; return pytest's exit status, that of a failure if they do not end."""
    python = [str(VLLM_PYTHON)] if on_vllm else [sys.executable]
    serial = [] if on_vllm else ["-n", "0"]  # vLLM's environment has no xdist
    command = [*python, "-m", "pytest", *PLAIN.split(), *serial, *options, *tests]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    limit_s = TIMEOUT_S if "-x" in options else None
    try:
        return subprocess.run(
            command, cwd=tree, env=env, capture_output=True, timeout=limit_s
        ).returncode
    except subprocess.TimeoutExpired:
        return SOME_FAILED


def sound_tests(tree: Path, chosen: Sequence[Defect]) -> set[str]:
    """Return the tests that pass in the copy as it is, with all their cases, none skipped."""
    results: dict[str, list[bool]] = {}
    report = tree / "planted.xml"
    for on_vllm in (False, True):
        tests = {x.test for x in chosen if ("vllm" in x.needs) is on_vllm}
        if not tests or (on_vllm and not VLLM_PYTHON.exists()):
            continue
        run_tests(tree, sorted(tests), on_vllm, f"--junitxml={report}")
        for case in ElementTree.parse(report).iter("testcase"):
            name = case.get("name", "").partition("[")[0]
            test = f"{case.get('classname', '').replace('.', '/')}.py::{name}"
            results.setdefault(test, []).append(len(case) == 0)
    return {test for test, passed in results.items() if all(passed)}


def verdict(tree: Path, defect: Defect) -> str:
    """Plant a defect, run its test, and take the defect out again."""
    if any(x.is_stale(tree) for x in defect.edits):
        return "stale"
    before = {x.file: (tree / x.file).read_text() for x in defect.edits}
    try:
        for edit in defect.edits:
            edit.apply(tree)
        status = run_tests(tree, [defect.test], "vllm" in defect.needs, "-x")
    finally:
        for name, text in before.items():
            (tree / name).write_text(text)
    return {0: "missed", SOME_FAILED: "caught"}.get(status, "broken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="defects whose case, words, test or file has it")
    parser.add_argument("--no-vllm", action="store_true", help="leave out tests of tests/vllm")
    parser.add_argument("--no-redis", action="store_true", help="leave out tests with a server")
    parser.add_argument("--list", action="store_true", help="run nothing; say which are stale")
    args = parser.parse_args()
    without = {x for x in ("vllm", "redis") if getattr(args, f"no_{x}")}
    chosen = [x for x in table() if args.only in str(x.__dict__) and without.isdisjoint(x.needs)]
    if args.list:
        for defect in chosen:
            stale = any(x.is_stale(ROOT) for x in defect.edits)
            print(f"{'stale' if stale else 'ready':8} {defect}  [{defect.test}]")
        return
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        sound = sound_tests(tree, chosen)
        for defect in chosen:
            result = verdict(tree, defect) if defect.test in sound else "unsound"
            found[result] += 1
            print(f"{result:8} {defect}  [{defect.test}]", flush=True)
    print(", ".join(f"{count} {result}" for result, count in found.items()))
    sys.exit(set(found) != {"caught"})


if __name__ == "__main__":
    main()
