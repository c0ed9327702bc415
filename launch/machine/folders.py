"""The folders in which Thermocline keeps its files, and checks that only this user can write them.

The *cache* folder has files that can be made again (the converted sample model, compiled code); the
*data* folder has the server's secret and the cold sessions.

Compilers write libraries under predictable names and load the files that they find there. If other
users can write the folder or replace one above it, an engine would run their code. So each
such folder is checked from the root of the file system down before an engine is started. The folder
of the admins' socket is checked, too, so that no other user can put a socket in its place.
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

# Compilers' variables, and the folders below "compiled" in the cache folder that we set them to. If
# the operator has set a variable, it is kept, and its folder is checked like ours. A server's
# TMPDIR, in which mlx compiles, is below "run", and new at each start.
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
# These are only checked: their defaults are below one of the folders above.
CHECKED: Final = ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", *COMPILED)
# A unix socket's path has at most 103 bytes on macOS and 107 on Linux. Below the folder the sockets
# of vLLM take up to 37 of these, and those of Python's multiprocessing in TMPDIR up to 36.
MAX_RUNTIME_DIR: Final = 103 - 37
PREFIX: Final = "thermocline-"  # of a folder that is not below our own
_RANDOM: Final = 8  # characters that tempfile adds
# ``serve`` writes its address into its data folder, where commands find it. If a killed server left
# the file, commands only report that no server answers there.
ADDRESS_FILE: Final = "address"
USUAL_ADDRESS: Final = "http://127.0.0.1:8080"
URL_VARIABLE: Final = "THERMOCLINE_URL"
_ADDRESS_BYTES: Final = 256
_PRIVATE: Final = 0o600
_ELSEWHERE: Final = "choose another cache folder with cache_dir or THERMOCLINE_CACHE_DIR"


def default_cache_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Return ``THERMOCLINE_CACHE_DIR`` or the default.

    That is ``~/.cache/thermocline``, on macOS ``~/Library/Caches/thermocline``.
    """
    return _customary(environ, platform, "CACHE_DIR", "Caches", "XDG_CACHE_HOME", ".cache")


def default_data_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Return ``THERMOCLINE_DATA_DIR`` or the default.

    That is ``~/.local/share/thermocline``, on macOS
    ``~/Library/Application Support/thermocline``.
    """
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
    """Return the folders of the settings; for "" the default of the environment or the system."""
    return Folders(
        Path(data_dir).expanduser() if data_dir else default_data_dir(environ),
        Path(cache_dir).expanduser() if cache_dir else default_cache_dir(environ),
    )


@contextmanager
def announced(data: Path, url: str) -> Iterator[None]:
    """Keep a server's address in its data folder inside the ``with`` block.

    The address of another running server that has already written the file is kept instead.
    """
    file = data / ADDRESS_FILE
    with ExitStack() as stack:
        with suppress(OSError):  # the file is a convenience, and the server runs without it
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _PRIVATE)
            kept = stack.enter_context(os.fdopen(descriptor, "r+b"))
            fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept.truncate()
            kept.write(f"{url}\n".encode())
            kept.flush()
            stack.callback(file.unlink, missing_ok=True)
        yield


def server_address(environ: Mapping[str, str]) -> str:
    """Return the address of the server for commands: ``THERMOCLINE_URL``, else ``address_here``."""
    return environ.get(URL_VARIABLE) or address_here(environ)


def address_here(environ: Mapping[str, str]) -> str:
    """Return the server's address in this user's data folder, else the default address."""
    try:
        with (default_data_dir(environ) / ADDRESS_FILE).open("rb") as file:
            found = file.read(_ADDRESS_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return USUAL_ADDRESS
    return found if found.isprintable() and found.startswith("http://") else USUAL_ADDRESS


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can use (0700), or check an existing one.

    Returns its real path, without symbolic links.

    Raises:
        LaunchError: the folder cannot be made or written, no code may be run from there, or
            another user can write or replace it.
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
            f"{folder} is on a file system from which no code may be run (noexec), and engines load"
            f" compiled code from there; {_ELSEWHERE}"
        )
    return folder


def require_closed_folder(path: str, setting: str) -> None:
    """Require that only this user and root can replace the socket ``path``.

    Raises:
        LaunchError: other users can write its folder, one above it, or one with a link on the path;
            the message names the ``setting``.
    """
    try:
        folder = Path(path).absolute().parent
        flaw = _flaw(folder, "they could put a socket of their own there", closed=True)
    except OSError as error:
        flaw = f"{error.filename}: {error.strerror}"
    if flaw:
        raise LaunchError(
            f"{setting}={path} cannot be used: {flaw}; make a folder for it that this user alone"
            " can write (mkdir -m 700), below no folder that others can, and name a path in it"
        )


def compile_environment(cache: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give an engine private folders for its compiled code.

    Raises:
        LaunchError: a folder cannot be made, or another user can write one that ``environ`` names.
    """
    for name in CHECKED:
        if given := environ.get(name):
            _check_given(name, Path(given))
    root = private_folder(cache / "compiled")
    return {name: str(root / x) for name, x in COMPILED.items() if not environ.get(name)}


@contextmanager
def server_folder(cache: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Make the folder of one server's sockets and temporary files; remove it after the block.

    It is in the cache folder, or, if that path is too long for sockets, in ``XDG_RUNTIME_DIR`` or
    ``/tmp`` under an unpredictable name.

    Raises:
        LaunchError: the folder cannot be made, or another user could write it.
    """
    for left in {environ.get("XDG_RUNTIME_DIR"), environ.get("TMPDIR"), "/tmp"} - {None, ""}:
        remove_abandoned(Path(str(left)), PREFIX)  # left by a killed server, perhaps an older one
    base, prefix = _base(private_folder(cache / "run"), environ)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(runtime_folder(base, prefix))
        except OSError as error:
            reason = error.strerror
            raise LaunchError(f"{base} cannot be written: {reason}; {_ELSEWHERE}") from error
        yield folder


def _base(own: Path, environ: Mapping[str, str]) -> tuple[Path, str]:
    """Return the folder in which to make that of a server, and the prefix of its name.

    It is the first one whose path is short enough for sockets.
    """
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
    """Return True if no code may be run from there; False if the system does not say."""
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))


def _refuse(flaw: str) -> None:
    if flaw:
        raise LaunchError(f"{flaw}; change that (chmod go-w, chown), or {_ELSEWHERE}")


def _check_given(name: str, path: Path) -> None:
    """Check a folder that the operator named; it may belong to root, and others may read it."""
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
    """Return the reason why another user could change the files in a folder; "" if none could.

    Args:
        path: absolute; symbolic links are followed, and the folders that contain them checked.
        harm: the possible harm, for the message.
        closed: other users must not be able to add files to the folder either.
        ours: as ``closed``, and the folder has to belong to this user.

    Raises ``OSError`` if the path does not exist.
    """
    os.path.realpath(path, strict=True)  # raises for links that form a circle
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

    The folders are paths without links. The last one is the target of the path; its name is "".
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
    # With an access list, the group's bits stand for all users and groups that the list names.
    return _has_access_list(folder) or not _is_private_group(found.st_gid)


def _has_access_list(folder: Path) -> bool:
    if sys.platform == "linux":
        with suppress(OSError):  # the file system has no access lists
            return "system.posix_acl_access" in os.listxattr(folder)
    return False


def _is_private_group(gid: int) -> bool:
    """Return True if root or this user is the only member of a group of the same name.

    On systems that give each user such a group, the group may write by default (umask 002).
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
