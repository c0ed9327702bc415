"""The invitation from one server to another: it is not shown, and stays one user's."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

from gateway.keys import generate_key
from kvstore.roster import EntrySeal, Facts, Roster
from kvstore.tiers.redis_server.link import RedisLink
from launch.errors import LaunchError, UsageError
from launch.joining import (
    accept,
    invitation_of,
    is_local,
    read_invitation,
    roll_call,
    write_invitation,
)
from launch.serve.keys import server_secret
from launch.settings.effective_settings import EffectiveSettings, effective_settings
from launch.settings.fields import Fields, Value
from launch.settings.schema import Settings
from launch.settings.sources import from_file
from tests.redis_server import RedisServer

REDIS = "redis://:correct-horse@10.0.0.9/0"


def settings(home: Path, **given: object) -> EffectiveSettings:
    layer = {
        "engine.kind": Value("fake", "test"),
        "data_dir": Value(str(home / "data"), "test"),
        "store.redis_url": Value(REDIS, "test"),
    }
    layer |= {name.replace("__", "."): Value(x, "test") for name, x in given.items()}
    return effective_settings([layer], {"HOME": str(home)})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_second_server_gets_the_settings_of_the_first(tmp_path: Path):
    _, line = generate_key("alice")
    (tmp_path / "keys").write_text(line + "\n")
    first = settings(
        tmp_path / "one",
        store__encrypt=True,
        store__max_kl=0.02,
        gateway__api_keys_file=str(tmp_path / "keys"),
    )
    secret = server_secret(first.folders.data)
    file = tmp_path / "invitation"
    write_invitation(invitation_of(first, {"PYTHONHASHSEED": "7"}), str(file))
    assert mode(file) == 0o600
    invitation = read_invitation(str(file))
    assert (invitation.secret, invitation.hash_seed) == (secret, "7")
    toml = accept(invitation, tmp_path / "two" / "joined")
    assert mode(toml.parent) == 0o700
    assert {mode(x) for x in toml.parent.iterdir()} == {0o600}
    layer = from_file(Fields(Settings), toml)
    second = effective_settings([layer], {"HOME": str(tmp_path)}).settings
    assert Path(second.store.secret_file).read_bytes() == secret
    assert (second.store.redis_url, second.store.encrypt) == (REDIS, True)
    assert second.store.max_kl == 0.02
    assert Path(second.gateway.api_keys_file).read_text() == line + "\n"
    accept(invitation, toml.parent)  # twice is as good as once
    assert tomllib.loads(toml.read_text())["store"]["redis_url"] == REDIS


def test_who_has_joined_others_keeps_their_secret(tmp_path: Path):
    one = invitation_of(settings(tmp_path / "one"), {})
    other = invitation_of(settings(tmp_path / "other"), {})
    accept(one, tmp_path / "joined")
    with pytest.raises(LaunchError, match="of other servers"):
        accept(other, tmp_path / "joined")
    assert (tmp_path / "joined" / "secret").read_bytes() == one.secret


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path):
    invitation = invitation_of(settings(tmp_path), {})
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("mine", "link"):
        with pytest.raises(LaunchError, match="cannot be written"):
            write_invitation(invitation, str(tmp_path / name))
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"secret": "c2VjcmV0"}', b"[" * 99])
def test_a_file_that_is_no_invitation_is_refused_and_not_quoted(tmp_path: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError, match="join --invite") as refused:
        read_invitation(str(tmp_path / "file"))
    assert "c2VjcmV0" not in str(refused.value)


def test_without_redis_there_is_nothing_to_join(tmp_path: Path):
    with pytest.raises(UsageError, match="redis_url"):
        invitation_of(settings(tmp_path, store__redis_url=""), {})


def test_an_address_of_this_machine_is_known_as_one():
    assert is_local("unix:///tmp/x.sock") and is_local("redis://localhost:6379/0")
    assert not is_local(REDIS)


@pytest.mark.redis
def test_the_roll_call_says_who_differs(tmp_path: Path):
    with RedisServer(tcp=True) as server:
        here = settings(tmp_path, store__redis_url=server.url)
        assert roll_call(here, {}) == (0, ())
        secret = server_secret(here.folders.data)
        for id, key, facts in (
            (b"1" * 8, secret, Facts(model="m", fingerprint="f1")),
            (b"2" * 8, secret, Facts(model="m", fingerprint="f2")),
            (b"3" * 8, b"o" * 32, Facts(model="m", fingerprint="f1")),
        ):
            link = RedisLink(server.url, 2.0)
            roster = Roster(link, EntrySeal(key))
            roster.look()
            assert roster.keep(id, facts)
            link.close()
        found = roll_call(here, {})
        assert found.alike == 2
        assert {x.kind: x.number for x in found.differing} == {"secret": 1, "fingerprint": 1}
        server.kill()
        with pytest.raises(LaunchError, match="does not answer"):
            roll_call(here, {})
