"""The folders in which Thermocline keeps its files, and those that only this user can write.

The *cache* folder holds what can be made again (the converted sample model, cold sessions); the
*data* folder holds what cannot (the server secret). Nothing here touches the disk.

Compilers put libraries under predictable names and load what they find there. In a folder that
another user may write, or below one that another user may replace, that is code of another user. So
each folder is checked from the root of the file system down, before an engine is started. So is the
folder of the admins' socket, whose place another user could take.
"""

from __future__ import annotations

import fcntl
import grp
import os
import pwd
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from engines.runtime_folder import remove_abandoned, runtime_folder
from launch.errors import LaunchError

# Folders that compilers keep from one start to the next, below "compiled" in the cache folder. A
# variable that the operator has set stays; its folder is checked like ours. A server's TMPDIR, in
# which mlx compiles, is below "run", and new at each start.
COMPILED: Final[Mapping[str, str]] = {
    "NUMBA_CACHE_DIR": "numba",
    "TRITON_HOME": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "torch-kernels",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "CUTE_DSL_CACHE_DIR": "cute-dsl",  # else /tmp/USER in some releases, for any TMPDIR
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "TILELANG_CACHE_DIR": "tilelang",
    "VLLM_CACHE_ROOT": "vllm",
    "HF_MODULES_CACHE": "hf-modules",  # code that came with a model
}
# These have a default below one of those above.
CHECKED: Final = ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", *COMPILED)
# A unix socket's path has 103 bytes on macOS, 107 on Linux. Of these vLLM's own take 37, and those
# that Python's multiprocessing makes in TMPDIR 36.
MAX_RUNTIME_DIR: Final = 103 - 37
PREFIX: Final = "thermocline-"  # outside of our own folders
_RANDOM: Final = 8  # characters that tempfile adds
# ``serve`` keeps its address in its data folder, by which commands find it. One that is left over
# from a server that was killed only costs the words that nothing answers there.
ADDRESS_FILE: Final = "address"
USUAL_ADDRESS: Final = "http://127.0.0.1:8080"
URL_VARIABLE: Final = "THERMOCLINE_URL"
_ADDRESS_BYTES: Final = 256
_PRIVATE: Final = 0o600
_ELSEWHERE: Final = "choose another cache folder with cache_dir or THERMOCLINE_CACHE_DIR"


def default_cache_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """``THERMOCLINE_CACHE_DIR``, else ``~/.cache/thermocline`` (macOS: ``~/Library/Caches``)."""
    return _customary(environ, platform, "CACHE_DIR", "Caches", "XDG_CACHE_HOME", ".cache")


def default_data_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """``THERMOCLINE_DATA_DIR``, else ``~/.local/share/thermocline`` (macOS: ``~/Library``)."""
    of_macos, of_xdg = "Application Support", ("XDG_DATA_HOME", ".local/share")
    return _customary(environ, platform, "DATA_DIR", of_macos, *of_xdg)


def _customary(
    environ: Mapping[str, str], platform: str, own: str, library: str, xdg: str, usual: str
) -> Path:
    if chosen := environ.get(f"THERMOCLINE_{own}"):
        return Path(chosen).expanduser()
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    if platform == "darwin":
        return home / "Library" / library / "thermocline"
    base = Path(environ.get(xdg, ""))
    # The XDG specification says that a relative path is to be ignored.
    return (base if base.is_absolute() else home / usual) / "thermocline"


class Folders(NamedTuple):
    """The data folder and the cache folder."""

    data: Path
    cache: Path


def folders(data_dir: str, cache_dir: str, environ: Mapping[str, str]) -> Folders:
    """The folders in the settings, else those of the system's custom."""
    return Folders(
        Path(data_dir).expanduser() if data_dir else default_data_dir(environ),
        Path(cache_dir).expanduser() if cache_dir else default_cache_dir(environ),
    )


@contextmanager
def announced(data: Path, url: str) -> Iterator[None]:
    """Keep the address of a server in its data folder while it runs.

    That of a server which has the folder already and still runs stays.
    """
    file = data / ADDRESS_FILE
    with ExitStack() as stack:
        with suppress(OSError):  # it is a convenience: the server runs without
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _PRIVATE)
            kept = stack.enter_context(os.fdopen(descriptor, "r+b"))
            fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept.truncate()
            kept.write(f"{url}\n".encode())
            kept.flush()
            stack.callback(file.unlink, missing_ok=True)
        yield


def server_address(environ: Mapping[str, str]) -> str:
    """Return the address of the server that commands ask: the one that is named, else ours here."""
    return environ.get(URL_VARIABLE) or address_here(environ)


def address_here(environ: Mapping[str, str]) -> str:
    """Return the address of the server of this user's data folder, else the usual one."""
    try:
        with (default_data_dir(environ) / ADDRESS_FILE).open("rb") as file:
            found = file.read(_ADDRESS_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return USUAL_ADDRESS
    return found if found.isprintable() and found.startswith("http://") else USUAL_ADDRESS


def private_folder(path: Path) -> Path:
    """Make the folder for this user alone (0700), or check the one that is there.

    Returns its real path, without links.

    Raises:
        LaunchError: it cannot be made or written, or another user can write or replace it.
    """
    path = path.expanduser().absolute()
    try:
        for each in (*reversed(path.parents), path):
            if not each.exists():
                _refuse(_flaw(each.parent.resolve()))
                each.mkdir(mode=0o700, exist_ok=True)
        folder = path.resolve(strict=True)
        _refuse(_flaw(path, ours=True))
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise LaunchError(f"{path} cannot be made: {error.strerror}; {_ELSEWHERE}") from error
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise LaunchError(f"{folder} cannot be written by this user; {_ELSEWHERE}")
    if _noexec(folder):
        raise LaunchError(
            f"{folder} lies on a file system from which no code may be run (noexec), and engines"
            f" load there what they compile; {_ELSEWHERE}"
        )
    return folder


def require_closed_folder(path: str, setting: str) -> None:
    """Require that only this user and root can put anything in the place of the socket ``path``.

    Raises:
        LaunchError: others can write its folder, one above it, or one that holds a link on the way
            to it; ``setting`` names it.
    """
    try:
        folder = Path(path).absolute().parent
        flaw = _flaw(folder, "they could put a socket of their own there", closed=True)
    except OSError as error:
        flaw = f"{error.filename}: {error.strerror}"
    if flaw:
        raise LaunchError(
            f"{setting}={path} cannot be used: {flaw}; make a folder for it that this user alone"
            " can write (mkdir -m 700), below none that others can, and name a path in that"
        )


def compile_environment(cache: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that give an engine private folders for its compiled code.

    Raises:
        LaunchError: a folder cannot be had, or another user can write one that ``environ`` names.
    """
    for name in CHECKED:
        if given := environ.get(name):
            _check_given(name, Path(given))
    root = private_folder(cache / "compiled")
    return {name: str(root / x) for name, x in COMPILED.items() if not environ.get(name)}


@contextmanager
def server_folder(cache: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """The folder of one server's sockets and temporary files; it exists inside the block only.

    It is in the cache folder. Where that has too long a path for sockets, it is in
    ``XDG_RUNTIME_DIR`` or ``/tmp``, under a name that cannot be foreseen.

    Raises:
        LaunchError: it cannot be made, or another user could write it.
    """
    for left in {environ.get("XDG_RUNTIME_DIR"), environ.get("TMPDIR"), "/tmp"} - {None, ""}:
        remove_abandoned(Path(str(left)), PREFIX)  # of earlier releases, and of other settings
    base, prefix = _base(private_folder(cache / "run"), environ)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(runtime_folder(base, prefix))
        except OSError as error:
            reason = error.strerror
            raise LaunchError(f"{base} cannot be written: {reason}; {_ELSEWHERE}") from error
        yield folder


def _base(own: Path, environ: Mapping[str, str]) -> tuple[Path, str]:
    """The first folder in which a server's own has a short path, and the prefix of its name."""
    if _fits(own, ""):
        return own, ""
    elsewhere = [Path(x) for x in (environ.get("XDG_RUNTIME_DIR"), "/tmp") if x]
    reasons = []
    for base in elsewhere:
        try:
            found = base.resolve(strict=True)
        except OSError as error:
            reasons.append(str(error))
            continue
        if flaw := _flaw(found):
            reasons.append(flaw)
        elif _fits(found, PREFIX) and os.access(found, os.W_OK | os.X_OK) and not _noexec(found):
            return found, PREFIX
    raise LaunchError(
        f"{own} has too long a path for the names of sockets, and there is no other place"
        f" ({'; '.join(reasons) or 'none can be written'}); {_ELSEWHERE}"
    )


def _fits(base: Path, prefix: str) -> bool:
    return len(os.fsencode(base)) + len("/") + len(prefix) + _RANDOM <= MAX_RUNTIME_DIR


def _noexec(folder: Path) -> bool:
    """True if no code may be run from there; False where the system does not say."""
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))


def _refuse(flaw: str) -> None:
    if flaw:
        raise LaunchError(f"{flaw}; change that (chmod go-w, chown), or {_ELSEWHERE}")


def _check_given(name: str, path: Path) -> None:
    """Check a folder that the operator named. It may be root's, and others may read it."""
    path = path.expanduser().absolute()
    try:
        there = next(x for x in (path, *path.parents) if x.exists())
        flaw = _flaw(there, closed=path.exists())
    except OSError as error:
        flaw = str(error)
    if flaw:
        raise LaunchError(f"{name}={path} cannot be used: {flaw}; unset it, or name another folder")


def _flaw(
    path: Path,
    harm: str = "engines load code from below it",
    *,
    closed: bool = False,
    ours: bool = False,
) -> str:
    """The reason why another user could change what lies under the path of a folder; else "".

    Args:
        path: absolute; links on the way are followed, and so is where they lie.
        harm: what would follow, in words.
        closed: others must not even add names to the folder itself.
        ours: it has to be closed, and this user's own.

    Raises ``OSError``: it leads nowhere.
    """
    os.path.realpath(path, strict=True)  # so no link leads in a circle
    for folder, name in _lookups(path):
        found = folder.stat()
        if found.st_uid != os.geteuid() and (found.st_uid or (ours and not name)):
            return f"{folder} belongs to {_user(found.st_uid)}, and {harm}"
        if not _others_write(folder, found):
            continue
        if not found.st_mode & stat.S_ISVTX or (not name and (closed or ours)):
            mode = stat.S_IMODE(found.st_mode)
            return f"other users can write {folder} (mode {mode:o}), and {harm}"
        if (owner := (folder / name).lstat().st_uid) not in (0, os.geteuid()):
            return f"{folder / name} belongs to {_user(owner)}, and {harm}"
    return ""


def _lookups(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield each folder in which the system looks up a part of a path, and that part's name.

    Folders are without links. The last one is where the path leads; its name is "".
    """
    folder, names = Path("/"), [*path.parts[:0:-1]]
    while names:
        if (name := names.pop()) == "..":
            folder = folder.parent
            continue
        yield folder, name
        found = folder / name
        if found.is_symlink():
            target = found.readlink()
            names += [x for x in reversed(target.parts) if x != target.anchor]
            folder = Path("/") if target.is_absolute() else folder
        else:
            folder = found
    yield folder, ""


def _others_write(folder: Path, found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_IWGRP:
        return False
    # Where there is an access list, these bits are of all that it names.
    return _has_access_list(folder) or not _is_private_group(found.st_gid)


def _has_access_list(folder: Path) -> bool:
    if sys.platform == "linux":
        with suppress(OSError):  # its file system has none
            return "system.posix_acl_access" in os.listxattr(folder)
    return False


def _is_private_group(gid: int) -> bool:
    """True for a group of one user, of that user's name: of root, or of this one.

    Systems with such groups let them write by default (umask 002).
    """
    try:
        group = grp.getgrgid(gid)
        owner = pwd.getpwnam(group.gr_name)
    except KeyError:
        return False
    return owner.pw_uid in (0, os.geteuid()) and set(group.gr_mem) <= {group.gr_name}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
