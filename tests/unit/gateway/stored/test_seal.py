"""Sealed texts open for the tenant that they were made for, unchanged, and for no other."""

from __future__ import annotations

from base64 import b64decode, b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.keys import Tenants
from gateway.stored.seal import NotOurs, SealedText

HERE = Tenants(b"a secret of the tests")


def of(tenants: Tenants, tenant: str) -> SealedText:
    return SealedText(tenants.key_of(tenant, b"compaction"))


ALICE = of(HERE, "alice")
SEALED = ALICE.close("what was said")


@given(st.text())
def test_a_text_comes_back(text: str) -> None:
    assert ALICE.open(ALICE.close(text)) == text


def test_a_restart_changes_nothing_and_two_seals_are_never_alike() -> None:
    again = of(Tenants(b"a secret of the tests"), "alice")
    assert again.open(SEALED) == "what was said"
    assert ALICE.close("x") != ALICE.close("x")
    assert b"said" not in b64decode(SEALED)


def test_no_other_tenant_opens_it() -> None:
    others = [of(HERE, "bob"), of(HERE, "alic"), of(HERE, "")]
    others.append(of(Tenants(b"another secret, of 16 or more"), "alice"))
    others.append(SealedText(HERE.salt_of("alice")))
    for other in others:
        with pytest.raises(NotOurs):
            other.open(SEALED)


def test_a_changed_one_opens_for_no_tenant() -> None:
    packed = b64decode(SEALED)
    for i in range(len(packed)):
        changed = packed[:i] + bytes([packed[i] ^ 1]) + packed[i + 1 :]
        with pytest.raises(NotOurs):
            ALICE.open(b64encode(changed).decode())
        with pytest.raises(NotOurs):
            ALICE.open(b64encode(packed[:i]).decode())


@given(st.one_of(st.text(), st.binary().map(lambda x: b64encode(b"\x01" + x).decode())))
def test_text_that_is_no_seal_does_not_open(text: str) -> None:
    with pytest.raises(NotOurs):
        ALICE.open(text)
