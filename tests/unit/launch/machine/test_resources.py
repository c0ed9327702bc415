"""Memory, open files, cores and BLAS that this process may have, containers' limits included."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from kvstore.workers import usable_cores
from launch.machine.blas import (
    PACKAGE,
    NoBlas,
    find_blas,
    plain_openblas,
    preload_environment,
    probe,
)
from launch.machine.resources import available_memory, machine_memory
from tests.command_line import program

V1_UNLIMITED = 9223372036854771712
ROOT = Path(__file__).parents[4]
# Gives up all privileges: root could raise a hard limit.
PROGRAM = """
import os, resource, sys
from launch.machine.resources import LaunchError, raise_open_files
soft, hard, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    print(raise_open_files(kind), *resource.getrlimit(resource.RLIMIT_NOFILE))
except LaunchError as error:
    print("refused:", error)
"""


def write_v1(folder: Path, limit: int, used: int, **stat: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{x} {n}\n" for x, n in stat.items()))


def write_v2(folder: Path, limit: int | str, used: int, **stat: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{x} {n}\n" for x, n in stat.items()))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    path.write_text("")
    return path


def test_a_limit_of_the_first_version_counts(tmp_path: Path, own: Path):
    unlimited = available_memory(tmp_path, own)
    write_v1(tmp_path / "memory", 1_000_000, 400_000)
    assert available_memory(tmp_path, own) == 600_000 < unlimited
    write_v1(tmp_path / "memory", 1_000_000, 1_000_001)
    assert available_memory(tmp_path, own) == 0
    write_v1(tmp_path / "memory", V1_UNLIMITED, 400_000)
    assert available_memory(tmp_path, own) > 600_000


def test_the_smallest_of_all_groups_above_counts(tmp_path: Path, own: Path):
    own.write_text("9:cpu,cpuacct:/x\n4:memory:/slice/unit\n0::/slice/unit\n")
    write_v1(tmp_path / "memory" / "slice" / "unit", 900_000, 0)
    write_v1(tmp_path / "memory" / "slice", 500_000, 100_000)
    assert available_memory(tmp_path, own) == 400_000
    write_v2(tmp_path / "slice" / "unit", 300_000, 0)
    write_v2(tmp_path / "slice", "max", 0)
    assert available_memory(tmp_path, own) == 300_000
    write_v2(tmp_path / "x", 1, 0)  # another's, and none of memory's
    write_v1(tmp_path / "memory" / "x", 1, 0)
    assert available_memory(tmp_path, own) == 300_000


def test_a_name_from_outside_of_the_container_finds_its_root(tmp_path: Path, own: Path):
    own.write_text("4:memory:/docker/0123abcd\n")
    write_v1(tmp_path / "memory", 1_000_000, 0)
    assert available_memory(tmp_path, own) == 1_000_000


def test_pages_of_files_are_left(tmp_path: Path, own: Path):
    write_v1(
        tmp_path / "memory", 1_000_000, 900_000, total_inactive_file=50_000, total_active_file=5_000
    )
    assert available_memory(tmp_path, own) == 155_000
    write_v2(tmp_path, 1_000_000, 950_000, inactive_file=60_000, active_file=4_000, anon=9)
    assert available_memory(tmp_path, own) == 114_000


def test_the_watched_memory_is_the_smaller_of_machine_and_container(tmp_path: Path, own: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:   2048 kB\n")
    write_v2(tmp_path, 3 << 20, 2 << 20)
    assert machine_memory(meminfo, tmp_path, own) == 1 << 20
    write_v2(tmp_path, 9 << 20, 0)
    assert machine_memory(meminfo, tmp_path, own) == 2 << 20
    meminfo.write_text("MemTotal:  128000000 kB\n")
    assert machine_memory(meminfo) is machine_memory(tmp_path / "missing") is None


@pytest.mark.parametrize("content", ["", "nonsense", "\n\n", "memory"])
def test_files_of_another_form_are_no_limit(tmp_path: Path, own: Path, content: str):
    own.write_text(content)
    for name in ("memory.max", "memory.current", "memory.stat"):
        (tmp_path / name).write_text(content)
    assert available_memory(tmp_path, own) > 0


def limits(soft: int, hard: int, kind: str) -> str:
    done = program(
        sys.executable, "-c", PROGRAM, str(soft), str(hard), kind, cwd=ROOT, check=True, timeout=60
    )
    return done.stdout.strip()


def test_the_soft_limit_becomes_the_hard_one():
    # Not above this process's own limit, which mlx_lm lowers where a test has imported it.
    assert limits(200, 4096, "mlx") == "4096 4096 4096"


@pytest.mark.parametrize(("hard", "kind"), [(1024, "mlx"), (200, "fake")])
def test_too_low_a_limit_is_refused_with_a_sentence(hard: int, kind: str):
    said = limits(hard, hard, kind)
    assert said.startswith(f"refused: only {hard} files may be open")
    assert ("mlx_lm" in said) == (kind == "mlx")


def test_other_engines_need_less_than_mlx_lm():
    assert limits(256, 1024, "fake") == "1024 1024 1024"


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")


def packaged() -> bool:
    try:
        return bool(distribution(PACKAGE))
    except PackageNotFoundError:
        return False


@pytest.fixture
def environ():
    """Ours, without a BLAS that is preloaded already."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def test_values_that_the_user_chose_stay():
    env = preload_environment({"LD_PRELOAD": "/a.so", "MKL_NUM_THREADS": "7"}, "/b.so", 2)
    assert env["LD_PRELOAD"] == "/a.so /b.so"
    assert env["OPENBLAS_NUM_THREADS"] == "2"
    assert "MKL_NUM_THREADS" not in env
    assert env["MKL_INTERFACE_LAYER"] == "LP64"


@pytest.mark.parametrize("path", ["/with blank/lib.so", "/with:colon/lib.so"])
def test_paths_that_the_loader_would_split_are_refused(path):
    with pytest.raises(NoBlas, match="a blank or a colon"):
        preload_environment({}, path, 2)


@on_linux
def test_a_process_without_blas_is_distinguished_from_one_with_it(environ):
    with pytest.raises(NoBlas, match="cblas_sgemm"):
        probe(environ)


@on_linux
def test_a_library_that_cannot_be_preloaded_is_noticed(environ):
    with pytest.raises(NoBlas, match="cannot be preloaded"):
        probe({**environ, "LD_PRELOAD": "/nonexistent/libblas.so"})


@on_linux
@pytest.mark.skipif(not packaged(), reason=f"{PACKAGE} is not installed")
def test_the_packaged_openblas_multiplies_under_the_plain_name(environ, tmp_path):
    library = plain_openblas(tmp_path)
    probe({**environ, **preload_environment(environ, str(library), 1)})
    assert plain_openblas(tmp_path) == library
    assert [x.name for x in library.parent.iterdir()] == [library.name]


@on_linux
@pytest.mark.skipif(not packaged(), reason=f"{PACKAGE} is not installed")
def test_a_fast_one_is_found_and_works(environ, tmp_path):
    found = find_blas(environ, tmp_path)
    assert found.fast
    probe({**environ, **found.env})
    again = find_blas({**environ, **found.env}, tmp_path)
    assert again.fast
    assert again.env == {}
    assert "preloaded by the user" in again.message


@on_linux
def test_a_cache_that_cannot_be_written_is_a_reason_not_an_error(environ, tmp_path):
    (tmp_path / "blas").write_bytes(b"a file, not a folder")
    find_blas(environ, tmp_path)


def test_macs_have_one():
    found = find_blas({}, cache_dir=None, system="darwin")  # type: ignore[arg-type]
    assert found.fast
    assert found.env == {}


def test_a_containers_quota_counts(tmp_path):
    quota = tmp_path / "cpu.max"
    everything = usable_cores(quota)
    quota.write_text("100000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("1000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == everything
