"""Folders that engines compile into and load from: only this user may write them."""

from __future__ import annotations

import os
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.machine.folders import (
    ADDRESS_FILE,
    MAX_RUNTIME_DIR,
    USUAL_ADDRESS,
    address_here,
    announced,
    compile_environment,
    private_folder,
    require_closed_folder,
    server_folder,
)
from launch.remote.server import server_url
from tests.command_line import program

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_it_is_made_for_this_user_alone_with_all_that_is_missing_above(tmp_path):
    folder = private_folder(tmp_path / "new" / "cache" / "run")
    assert [mode(x) for x in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3


def test_one_that_others_could_only_read_is_closed(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    assert mode(private_folder(tmp_path / "run")) == 0o700


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o703])
def test_one_that_others_can_write_is_refused(tmp_path, bits):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(LaunchError, match=rf"other users can write {folder} \(mode .*chmod go-w"):
        private_folder(folder)


def test_one_that_others_could_replace_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(LaunchError, match=f"other users can write {tmp_path} "):
        private_folder(tmp_path / "cache" / "run")
    assert not (tmp_path / "cache").exists()  # nothing was made there
    tmp_path.chmod(0o1777)  # as /tmp: others add names, and cannot change ours
    private_folder(tmp_path / "cache" / "run")


def test_a_link_counts_by_where_it_leads(tmp_path):
    real, seen = tmp_path / "real", tmp_path / "seen"
    (real / "cache").mkdir(parents=True)
    seen.symlink_to(real)
    assert private_folder(seen / "cache") == real / "cache"
    real.chmod(0o777)
    with pytest.raises(LaunchError, match=f"other users can write {real} "):
        private_folder(seen / "cache")


def test_one_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot be made: Not a directory; choose another cache"):
        private_folder(tmp_path / "file" / "run")


@as_root
@pytest.mark.parametrize("of_parent", [False, True])
def test_one_of_another_user_is_refused(tmp_path, of_parent):
    folder = tmp_path / "cache" / "run"
    folder.mkdir(parents=True)
    theirs = folder.parent if of_parent else folder
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(LaunchError, match=f"{theirs} belongs to user nobody"):
        private_folder(folder)


@as_root
def test_one_that_the_first_user_closed_is_a_sentence_for_the_second(tmp_path):
    """An error here kept the second user's engine in a crash loop."""
    tmp_path.chmod(0o1777)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o711)
    private_folder(tmp_path / "cache" / "run")
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from launch.errors import LaunchError\n"
        "from launch.machine.folders import private_folder\n"
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "try:\n"
        "    private_folder(Path(sys.argv[1]))\n"
        "except LaunchError as error:\n"
        "    print(error)\n"
    )
    run = program(sys.executable, "-c", script, str(tmp_path / "cache" / "run"))
    assert run.returncode == 0, run.stderr
    assert f"{tmp_path}/cache" in run.stdout and "choose another cache folder" in run.stdout


def test_compilers_get_folders_below_a_private_one(tmp_path):
    env = compile_environment(tmp_path, {})
    needed = {"NUMBA_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"}
    assert needed | {"CUTE_DSL_CACHE_DIR", "TILELANG_CACHE_DIR"} <= {*env}
    assert all(Path(x).parent == tmp_path / "compiled" for x in env.values())
    assert mode(tmp_path / "compiled") == 0o700


def test_a_folder_that_the_operator_chose_stays_and_is_checked(tmp_path):
    given = tmp_path / "given"
    given.mkdir(mode=0o755)
    environ = {"VLLM_CACHE_ROOT": str(given), "TRITON_CACHE_DIR": str(given / "not-there-yet")}
    assert "VLLM_CACHE_ROOT" not in compile_environment(tmp_path, environ)
    given.chmod(0o1777)
    with pytest.raises(LaunchError, match="VLLM_CACHE_ROOT=.* be used: other users can write"):
        compile_environment(tmp_path, {"VLLM_CACHE_ROOT": str(given)})


def test_a_server_has_its_folder_in_the_cache_where_the_path_is_short(tmp_path_factory):
    cache = Path("/tmp") / f"tc-{os.getpid()}"
    try:
        with server_folder(cache, {}) as folder:
            assert folder.parent == cache.resolve() / "run"
    finally:
        (cache / "run").rmdir()
        cache.rmdir()


def test_else_it_is_elsewhere_under_a_name_that_cannot_be_foreseen(tmp_path):
    cache = tmp_path / ("x" * MAX_RUNTIME_DIR)
    with server_folder(cache, {"XDG_RUNTIME_DIR": str(tmp_path / "none")}) as folder:
        assert folder.parent == Path("/tmp").resolve() and folder.name.startswith("thermocline-")
        assert mode(folder) == 0o700 and len(str(folder)) <= MAX_RUNTIME_DIR
    assert not folder.exists()


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o770])
def test_a_socket_whose_place_others_could_take_is_refused(tmp_path, bits):
    folder = tmp_path / "shared"
    folder.mkdir()
    require_closed_folder(str(folder / "s"), "gateway.admin_socket")
    if bits == 0o770 and os.geteuid() == 0:
        os.chown(folder, 0, NOBODY)
    folder.chmod(bits)
    said = rf"gateway.admin_socket={folder}/s cannot be used: .*write {folder} .*mkdir -m 700"
    with pytest.raises(LaunchError, match=said):
        require_closed_folder(str(folder / "s"), "gateway.admin_socket")
    (folder / "own").mkdir(mode=0o700)
    if bits == 0o1777:  # as below /tmp: no other user can move it away
        require_closed_folder(str(folder / "own" / "s"), "gateway.admin_socket")
    else:
        with pytest.raises(LaunchError, match=f"write {folder} "):
            require_closed_folder(str(folder / "own" / "s"), "gateway.admin_socket")


def test_a_socket_needs_a_folder(tmp_path):
    with pytest.raises(LaunchError, match=f"{tmp_path}/no: No such file.*mkdir -m 700"):
        require_closed_folder(str(tmp_path / "no" / "s"), "gateway.admin_socket")


@pytest.mark.parametrize("bits", [0o777, 0o1777])
def test_a_link_that_others_could_turn_elsewhere_is_refused(tmp_path, bits):
    """Clients, and compilers, take the path as it was given."""
    (tmp_path / "own").mkdir(mode=0o700)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "link").symlink_to("../own")
    (tmp_path / "own" / "there").symlink_to(shared / "link")
    shared.chmod(bits)
    if bits == 0o1777:
        if os.geteuid() != 0:
            pytest.skip("only root gives a link to another user")
        require_closed_folder(str(shared / "link" / "s"), "gateway.admin_socket")  # ours
        os.chown(shared / "link", NOBODY, NOBODY, follow_symlinks=False)
    said = f"{shared}/link belongs to" if bits == 0o1777 else f"write {shared} "
    for path in (shared / "link", tmp_path / "own" / "there"):
        with pytest.raises(LaunchError, match=said):
            require_closed_folder(str(path / "s"), "gateway.admin_socket")
        with pytest.raises(LaunchError, match=said):
            compile_environment(tmp_path / "cache", {"VLLM_CACHE_ROOT": str(path)})
        with pytest.raises(LaunchError, match=said):
            private_folder(path)


def test_a_link_that_leads_in_a_circle_is_refused(tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(LaunchError, match="circle"):
        require_closed_folder(str(tmp_path / "circle" / "s"), "gateway.admin_socket")
    with pytest.raises(LaunchError, match="circle"):
        private_folder(tmp_path / "circle")


def test_an_access_list_that_lets_others_write_counts(tmp_path):
    """Where there is one, the bits of the group are those of all that it names."""
    folder = tmp_path / "listed"
    folder.mkdir(mode=0o700)
    nobody_writes = [(1, 7, -1), (2, 7, NOBODY), (4, 0, -1), (16, 7, -1), (32, 0, -1)]
    written = b"".join(struct.pack("<HHi", *x) for x in nobody_writes)
    with suppress(OSError, AttributeError):
        os.setxattr(folder, "system.posix_acl_access", struct.pack("<I", 2) + written)
    if mode(folder) != 0o770:
        pytest.skip("there are no access lists here")
    with pytest.raises(LaunchError, match=rf"write {folder} \(mode 770\)"):
        require_closed_folder(str(folder / "s"), "gateway.admin_socket")


def test_a_server_that_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    environ = {"THERMOCLINE_DATA_DIR": str(tmp_path)}
    assert address_here(environ) == USUAL_ADDRESS
    with announced(tmp_path, "http://127.0.0.1:9191"):
        assert address_here(environ) == "http://127.0.0.1:9191"
        assert stat.S_IMODE((tmp_path / ADDRESS_FILE).stat().st_mode) == 0o600
        monkeypatch.setenv("THERMOCLINE_DATA_DIR", str(tmp_path))
        assert server_url("") == "http://127.0.0.1:9191"
        assert server_url("localhost:1") == "http://localhost:1"
    assert address_here(environ) == USUAL_ADDRESS and not (tmp_path / ADDRESS_FILE).exists()


def test_another_servers_address_stays(tmp_path: Path):
    environ = {"THERMOCLINE_DATA_DIR": str(tmp_path)}
    (tmp_path / ADDRESS_FILE).write_text("http://127.0.0.1:999999 of a server that was killed\n")
    with announced(tmp_path, "http://127.0.0.1:1"):
        with announced(tmp_path, "http://127.0.0.1:2"):
            assert address_here(environ) == "http://127.0.0.1:1"
        assert address_here(environ) == "http://127.0.0.1:1"
    assert not (tmp_path / ADDRESS_FILE).exists()


@pytest.mark.parametrize("content", [b"", b"ftp://x", b"http://x\x1b[0m", b"\xff\xfe", b"x" * 999])
def test_a_file_that_is_no_address_is_ignored(content: bytes, tmp_path: Path):
    (tmp_path / ADDRESS_FILE).write_bytes(content)
    assert address_here({"THERMOCLINE_DATA_DIR": str(tmp_path)}) == USUAL_ADDRESS


def test_a_folder_that_cannot_be_written_keeps_no_server_from_running(tmp_path: Path):
    with announced(tmp_path / "missing", "http://127.0.0.1:1"):
        pass
