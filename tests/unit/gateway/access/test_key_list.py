"""Keys of a running server: made, listed and revoked in their file, whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.access.key_list import KeyList, KeyListFixed, lines_of
from gateway.config import GatewayConfig
from gateway.keys import BadKeyLine, Tenants, generate_key, key_facts

FIRST, SECOND, ADMIN = (generate_key(x) for x in ("alice", "bob", "root"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{FIRST[1]}\n")
    return path


def opened(config: GatewayConfig) -> tuple[KeyList, Tenants]:
    tenants = Tenants(b"0123456789abcdef", *lines_of(config))
    return KeyList(tenants, config), tenants


def works(tenants: Tenants, key: str) -> bool:
    try:
        return tenants.authenticate(f"Bearer {key}").name != "local"
    except Exception:  # a refusal of any kind
        return False


def test_a_key_works_from_when_it_is_added_until_it_is_revoked(file: Path):
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file)))
    keys.add(SECOND[1] + " sessions=3")
    assert works(tenants, SECOND[0])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (_, (made, where)) = keys.facts()
    assert (made.tenant, made.limits and made.limits.sessions, where) == ("bob", 3, "file")
    assert keys.revoke(made.id)
    assert not works(tenants, SECOND[0]) and works(tenants, FIRST[0])
    assert file.read_text() == f"# ours\n{FIRST[1]}\n", "comments and other lines stay"
    assert not keys.revoke(made.id)
    assert [x.name for x in file.parent.iterdir()] == ["keys"]


def test_lines_that_were_added_by_hand_meanwhile_stay(file: Path):
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file)))
    by_hand = generate_key("carol")
    file.write_text(file.read_text() + by_hand[1] + "\n")
    keys.add(SECOND[1])
    assert works(tenants, by_hand[0])


def test_a_forbidden_change_is_refused_and_changes_nothing(file: Path):
    alone, _ = opened(GatewayConfig(api_keys=(FIRST[1],)))
    with pytest.raises(KeyListFixed, match="api_keys_file"):
        alone.add(SECOND[1])
    with pytest.raises(KeyListFixed, match="settings"):
        alone.revoke(key_facts(FIRST[1]).id)
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file)))
    with pytest.raises(KeyListFixed, match="last key"):
        keys.revoke(key_facts(FIRST[1]).id)
    with pytest.raises(BadKeyLine):
        keys.add("nonsense")
    assert works(tenants, FIRST[0]) and file.read_text() == f"# ours\n{FIRST[1]}\n"


@pytest.mark.parametrize("where", ["api_keys", "admin_keys"])
def test_a_key_that_the_settings_name_as_well_is_not_revoked_in_vain(file: Path, where: str):
    file.write_text(f"{FIRST[1]}\n{SECOND[1]}\n")
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file), **{where: (SECOND[1],)}))
    with pytest.raises(KeyListFixed, match="settings"):
        keys.revoke(key_facts(SECOND[1]).id)
    assert SECOND[1] in file.read_text() and works(tenants, SECOND[0])


def test_an_open_server_is_not_locked_by_a_first_key(file: Path):
    file.write_text("")
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file)))
    with pytest.raises(KeyListFixed, match="needs no key"):
        keys.add(SECOND[1])
    assert not file.read_text() and tenants.open_to_all


def test_a_change_keeps_the_admins_keys(file: Path):
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file), admin_keys=(ADMIN[1],)))
    keys.add(SECOND[1])
    assert tenants.authenticate(f"Bearer {ADMIN[0]}").admin
    assert not tenants.authenticate(f"Bearer {SECOND[0]}").admin
    assert [(x.tenant, x.admin) for x, _ in keys.facts()] == [
        ("alice", False),
        ("bob", False),
        ("root", True),
    ]
    with pytest.raises(KeyListFixed):
        keys.revoke(key_facts(ADMIN[1]).id)


def test_an_admin_key_beside_an_open_server_is_the_only_way_to_be_one():
    _, tenants = opened(GatewayConfig(admin_keys=(ADMIN[1],)))
    assert tenants.open_to_all
    assert tenants.authenticate(f"Bearer {ADMIN[0]}").admin
    for authorization in (None, "Bearer something", f"Bearer {ADMIN[0]}x"):
        assert not tenants.authenticate(authorization).admin
