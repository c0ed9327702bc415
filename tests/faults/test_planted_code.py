"""A library under the name that mlx compiles to, put where every user can write: it never runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launch.machine.folders import compile_environment
from tests.integration.mlx_owner.harness import session
from tests.integration.test_mlx_worker_process import complete, running, settings
from tests.integration.tiny_models import write_model

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

NOBODY = 65534
# Runs when it is loaded, and says so.
PLANTED = """
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) static void runs() {
    std::fclose(std::fopen(std::getenv("PLANTED_RAN"), "w"));
}
"""


async def test_a_planted_library_does_not_run(tmp_path: Path, monkeypatch) -> None:
    if not shutil.which("g++"):
        pytest.skip("without a C++ compiler mlx compiles nothing")
    model, shared, ran = tmp_path / "model", tmp_path / "shared", tmp_path / "ran"
    for each in (model, shared):
        each.mkdir()
    shared.chmod(0o1777)
    write_model("llama", model)
    monkeypatch.setenv("TMPDIR", str(shared))
    config, env = settings(model, tmp_path), compile_environment(tmp_path / "cache", {})
    async with running(config, env) as server:  # which names does this model compile to?
        await complete(server, [1, 2, 3], session("a"))
        found = [*tmp_path.glob("run/tmp/mlx/*/cpu/*.so"), *shared.glob("mlx/*/cpu/*.so")]
        names = [x.relative_to(next(y for y in x.parents if y.name == "mlx")) for x in found]
    assert names
    shutil.rmtree(shared / "mlx", ignore_errors=True)
    source = tmp_path / "planted.cpp"
    source.write_text(PLANTED)
    for name in names:
        library = shared / "mlx" / name
        library.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    if os.geteuid() == 0:
        for each in (shared / "mlx").rglob("*"):
            os.chown(each, NOBODY, NOBODY)
    planted = {x: x.stat().st_mtime_ns for x in (shared / "mlx").rglob("*")}
    async with running(config, {**env, "PLANTED_RAN": str(ran)}) as server:
        await complete(server, [1, 2, 3], session("b"))
        compiled = [*tmp_path.glob("run/tmp/mlx/*/cpu/*.so")]
    assert not ran.exists()
    assert {x.name for x in compiled} == {x.name for x in names}
    assert {x: x.stat().st_mtime_ns for x in (shared / "mlx").rglob("*")} == planted
