from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from kvstore.workers import usable_cores
from launch.machine.blas import (
    PACKAGE,
    NoBlas,
    blas_threads,
    find_blas,
    plain_openblas,
    preload_environment,
    probe,
)

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


def test_one_core_is_left_to_the_rest_of_the_product():
    assert [blas_threads(n) for n in (1, 2, 20)] == [1, 1, 19]
