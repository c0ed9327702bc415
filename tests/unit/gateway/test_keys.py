"""API keys, tenants and salts."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from engines.openai.requests import InvalidRequest
from gateway.config import GatewayConfig
from gateway.edge.key_list import KeyList, KeyListFixed, lines_of
from gateway.keys import (
    ANONYMOUS,
    BadKeyLine,
    Limits,
    Tenants,
    generate_key,
    read_key,
)

SECRET = b"sixteen bytes or more"
FIRST, SECOND, ADMIN = (generate_key(x) for x in ("alice", "bob", "root"))


def test_without_keys_everybody_is_one_tenant() -> None:
    tenants = Tenants(SECRET)
    assert tenants.open_to_all
    assert tenants.authenticate(None) == tenants.authenticate("Bearer anything")
    assert tenants.authenticate(None).name == ANONYMOUS


def test_a_key_opens_its_tenant_only_and_two_may_open_one() -> None:
    made = [generate_key(name) for name in ("alice", "bob", "alice")]
    tenants = Tenants(SECRET, [line for _, line in made])
    first = tenants.authenticate(f"Bearer {made[0][0]}")
    assert (first.name, tenants.authenticate(f"bearer  {made[1][0]} ").name) == ("alice", "bob")
    second = tenants.authenticate(f"Bearer {made[2][0]}")
    assert first[:2] == second[:2] and first.key_id != second.key_id


@pytest.mark.parametrize(
    "shown", [None, "", "Bearer", "Bearer ", "Basic {key}", "{key}", "Bearer {key}x", "Bearer tc-"]
)
def test_everything_else_is_401_and_never_shown(shown: str | None) -> None:
    key, line = generate_key("alice")
    with pytest.raises(InvalidRequest) as caught:
        Tenants(SECRET, [line]).authenticate(shown and shown.format(key=key))
    assert caught.value.status == 401
    assert caught.value.code == "invalid_api_key"
    assert key not in caught.value.message


def test_the_list_holds_hashes_only() -> None:
    key, line = generate_key("alice")
    assert key not in line
    assert key.removeprefix("tc-") not in line


def test_salts_differ_by_tenant_and_by_secret() -> None:
    one, other = Tenants(SECRET), Tenants(b"another secret of a server")
    salts = {one.salt_of("a"), one.salt_of("b"), other.salt_of("a"), other.salt_of("b")}
    assert len(salts) == 4
    assert one.salt_of("a") == Tenants(SECRET).salt_of("a")


@pytest.mark.parametrize(
    "line", ["alice", "alice:abc", "a b:" + "0" * 64, ":" + "0" * 64, "é:" + "0" * 64]
)
def test_a_bad_line_is_named_by_number_and_not_quoted(line: str) -> None:
    with pytest.raises(BadKeyLine, match="line 2") as caught:
        Tenants(SECRET, ["# first", line])
    assert line not in str(caught.value)


@pytest.mark.parametrize("name", ["#x", "# x", "", "a b", "x:y"])
def test_a_name_that_makes_no_key_is_refused(name: str) -> None:
    with pytest.raises(BadKeyLine):
        generate_key(name)
    with pytest.raises(BadKeyLine):
        read_key(f"{name}:{'0' * 64}")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Tenants(b"short")


def test_other_keys_are_taken_all_at_once_or_not_at_all() -> None:
    (old, line_old), (new, line_new) = generate_key("alice"), generate_key("alice")
    tenants = Tenants(SECRET, [line_old])
    for wrong in ([line_new, "nonsense"], []):
        with pytest.raises(BadKeyLine):
            tenants.replace(wrong)
        assert tenants.authenticate(f"Bearer {old}").name == "alice"
    tenants.replace([line_new])
    assert tenants.authenticate(f"Bearer {new}").name == "alice"
    with pytest.raises(InvalidRequest):
        tenants.authenticate(f"Bearer {old}")
    with pytest.raises(BadKeyLine):  # a key is refused now if it would have been at the start
        Tenants(SECRET).replace([line_new])


class ReplacedMeanwhile(Tenants):
    """Gets other keys while it looks at one that it has found."""

    def salt_of(self, name: str) -> bytes:
        if name == "alice":
            self.replace([generate_key("bob")[1]])
        return super().salt_of(name)


def test_a_key_that_goes_while_it_is_looked_at_is_no_defect() -> None:
    key, line = generate_key("alice")
    tenants = ReplacedMeanwhile(SECRET, [line + " weight=3"])
    caller = tenants.authenticate(f"Bearer {key}")
    assert caller.weight == 3
    with pytest.raises(InvalidRequest):
        tenants.authenticate(f"Bearer {key}")


def test_a_weight_stands_beside_limits_and_changes_none() -> None:
    key, line = generate_key("alice")
    for words, weight, limits in (
        ("", 1, None),
        (" weight=7", 7, None),
        (" sessions=3 weight=2", 2, Limits(sessions=3)),
    ):
        tenant = Tenants(SECRET, [line + words]).authenticate(f"Bearer {key}")
        assert (tenant.weight, tenant.limits) == (weight, limits)
    other = generate_key("alice")[1]
    tenants = Tenants(SECRET, [line + " weight=2", generate_key("bob")[1] + " weight=9"], [other])
    assert tenants.authenticate(f"Bearer {key}").weight == 2
    tenants.replace([line, f"{other} weight=5"])
    assert tenants.authenticate(f"Bearer {key}").weight == 5, "a tenant has one share"
    for wrong in ("weight=0", "weight=1000001"):
        with pytest.raises(BadKeyLine, match="from 1 to"):
            Tenants(SECRET, [f"{line} {wrong}"])


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
    (_, (made, where)) = keys.listed()
    assert (made.tenant, made.limits and made.limits.sessions, where) == ("bob", 3, "file")
    assert keys.revoke(made.id)
    assert not works(tenants, SECOND[0]) and works(tenants, FIRST[0])
    assert file.read_text() == f"# ours\n{FIRST[1]}\n", "comments and other lines stay"
    assert not keys.revoke(made.id)
    assert [x.name for x in file.parent.iterdir()] == ["keys"]


def test_lines_that_were_added_by_hand_meanwhile_stay(file: Path):
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file)))
    by_hand = generate_key("carol")
    file.write_text(f"{file.read_text()}\n  {by_hand[1]}  \n")
    keys.add(SECOND[1])
    assert works(tenants, by_hand[0])


def test_a_forbidden_change_is_refused_and_changes_nothing(file: Path):
    alone, _ = opened(GatewayConfig(api_keys=(FIRST[1],)))
    with pytest.raises(KeyListFixed, match="api_keys_file"):
        alone.add(SECOND[1])
    with pytest.raises(KeyListFixed, match="settings"):
        alone.revoke(read_key(FIRST[1]).id)
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file)))
    with pytest.raises(KeyListFixed, match="last key"):
        keys.revoke(read_key(FIRST[1]).id)
    with pytest.raises(BadKeyLine):
        keys.add("nonsense")
    assert works(tenants, FIRST[0]) and file.read_text() == f"# ours\n{FIRST[1]}\n"


@pytest.mark.parametrize("where", ["api_keys", "admin_keys"])
def test_a_key_that_the_settings_name_as_well_is_not_revoked_in_vain(file: Path, where: str):
    file.write_text(f"{FIRST[1]}\n{SECOND[1]}\n")
    keys, tenants = opened(GatewayConfig(api_keys_file=str(file), **{where: (SECOND[1],)}))
    with pytest.raises(KeyListFixed, match="settings"):
        keys.revoke(read_key(SECOND[1]).id)
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
    assert [(x.tenant, x.admin) for x, _ in keys.listed()] == [
        ("alice", False),
        ("bob", False),
        ("root", True),
    ]
    with pytest.raises(KeyListFixed):
        keys.revoke(read_key(ADMIN[1]).id)


def test_an_admin_key_beside_an_open_server_is_the_only_way_to_be_one():
    _, tenants = opened(GatewayConfig(admin_keys=(ADMIN[1],)))
    assert tenants.open_to_all
    assert tenants.authenticate(f"Bearer {ADMIN[0]}").admin
    for authorization in (None, "Bearer something", f"Bearer {ADMIN[0]}x"):
        assert not tenants.authenticate(authorization).admin
