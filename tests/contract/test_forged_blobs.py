"""A writer to the disk or to Redis cannot make a store accept a forged blob."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.blobs.format import pack, parse
from kvstore.config import StoreConfig
from kvstore.tiers.base import Blob, Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.redis_server.redis_tier import RedisTier
from kvstore.tiers.registry import open_tiers
from kvstore.tiers.seal import NOT_OURS, SEAL_BYTES, Seal, SealedTier
from tests.contract.store_rig import FORK, LONG, LONGER, MIB, Rig, ref
from tests.redis_server import RedisServer

SECRET = b"sixteen bytes or more"
NUM = 1000
BATCH = 500


@pytest.fixture(params=["disk", pytest.param("redis", marks=pytest.mark.redis)])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """The tier as an attacker has it: all that our own code can do, but for the secret."""
    with ExitStack() as stack:
        if request.param == "disk":
            tier: Tier = DiskTier(tmp_path / "cold", 256 * MIB)
        else:
            server = stack.enter_context(RedisServer())
            tier = RedisTier(server.url, deadline_s=10.0)
        stack.callback(tier.close)
        yield tier


def sealed(tier: Tier, secret: bytes = SECRET, place: str = "", encrypt: bool = False) -> Tier:
    return SealedTier(tier, Seal(secret, place or tier.name, encrypt=encrypt))


def zeros(stored: Blob) -> bytes:
    """The same blob with no KV in it, all its checksums right, and the seal of the old one."""
    raw = bytes(stored)
    header, payload = parse(raw[:-SEAL_BYTES])
    return pack(header, bytes(len(payload))) + raw[-SEAL_BYTES:]


def test_forged_rows_are_a_miss_and_counted(rig: Rig, bare: Tier) -> None:
    """Their checksums are right, so only the seal is wrong; ``back`` compares every row."""
    store = rig.open([sealed(bare)])
    rig.save(store, ref(), LONG)
    for name, stored in list(bare.scan(b"c")):
        assert bare.replace(name, zeros(stored))
    back = rig.back(store, ref(), LONG)
    assert (back.num_tokens, back.reason) == (0, "corrupt")
    assert store.stats().tiers[0].errors > 0
    for _ in range(len(LONG) // 16 + 1):  # each return finds one, and the save after it mends it
        rig.save(store, ref(), LONG)
        back = rig.back(store, ref(), LONG)
    assert back.num_tokens == 96


def test_without_a_seal_the_same_rows_would_be_believed(rig: Rig, bare: Tier) -> None:
    """What the tests here would look like if they could not fail."""
    store = rig.open([bare])
    rig.save(store, ref(), LONG)
    for name, stored in list(bare.scan(b"c")):
        assert bare.replace(name, zeros(bytes(stored) + bytes(SEAL_BYTES))[:-SEAL_BYTES])
    with pytest.raises(AssertionError):
        rig.back(store, ref(), LONG)


def names(number: int) -> list[bytes]:
    return [b"c%032d" % i for i in range(number)]


Forger = Callable[[Tier, list[bytes], list[bytes]], list[tuple[bytes, bytes]]]


def forged(bare: Tier, inner: list[bytes], keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Bytes of the attacker's choice, of the right length."""
    chance = random.Random(1)
    return [(name, chance.randbytes(300 + SEAL_BYTES)) for name in inner]


def changed(bare: Tier, inner: list[bytes], keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    """One bit off, anywhere: content, tag or nonce."""
    chance, result = random.Random(2), []
    for name, blob in zip(inner, bare.get_many(inner), strict=True):
        assert blob is not None
        other = bytearray(blob)
        other[chance.randrange(len(other))] ^= 1 << chance.randrange(8)
        result.append((name, bytes(other)))
    return result


def swapped(bare: Tier, inner: list[bytes], keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Good blobs, each under the name of its neighbour."""
    there = [bytes(x) for x in bare.get_many(inner) if x is not None]
    return list(zip(inner, there[1:] + there[:1], strict=True))


def from_elsewhere(bare: Tier, inner: list[bytes], keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Sealed by the same secret under the same name, for another tier."""
    seal = Seal(SECRET, "tape", encrypt=False)
    return [(name, seal.close(key, key * 9)) for name, key in zip(inner, keys, strict=True)]


def by_another(bare: Tier, inner: list[bytes], keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Sealed by a server of another secret."""
    seal = Seal(b"another secret of others", bare.name, encrypt=False)
    return [(name, seal.close(key, key * 9)) for name, key in zip(inner, keys, strict=True)]


@pytest.mark.parametrize("forge", [forged, changed, swapped, from_elsewhere, by_another])
def test_a_thousand_of_each_kind_are_refused(bare: Tier, forge: Forger) -> None:
    """The keys come in batches, each written by us, tampered with, and read by us."""
    tier = sealed(bare)
    suffix = Seal(SECRET, bare.name, encrypt=False).key_name
    for first in range(0, NUM, BATCH):
        keys = names(first + BATCH)[first:]
        inner = [key + suffix for key in keys]
        assert tier.put_many([(key, key * 9) for key in keys]) == BATCH
        tampered = forge(bare, inner, keys)
        bare.delete_many(inner)
        assert bare.put_many(tampered) == BATCH
        assert tier.get_many(keys) == [NOT_OURS] * BATCH
        bare.delete_many(inner)
    assert tier.stats().errors >= NUM


@pytest.mark.parametrize("encrypt", [False, True])
def test_another_secret_finds_nothing_and_takes_nothing_away(bare: Tier, encrypt: bool) -> None:
    ours, others = (
        sealed(bare, encrypt=encrypt),
        sealed(bare, b"their own secret!", encrypt=encrypt),
    )
    assert ours.put_many([(b"rone", b"blob of ours")]) == 1
    assert others.get_many([b"rone"]) == [None]
    assert list(others.scan(b"r")) == []
    assert others.put_many([(b"rone", b"blob of theirs")]) == 1
    assert others.delete_many([b"rone"]) == 1
    assert [bytes(x) for x in ours.get_many([b"rone"]) if x is not None] == [b"blob of ours"]
    assert [(key, bytes(blob)) for key, blob in ours.scan(b"r")] == [(b"rone", b"blob of ours")]


def test_what_is_encrypted_cannot_be_read(bare: Tier) -> None:
    text = b"a prompt that no other tenant may read " * 20
    for encrypt in (True, False):
        assert sealed(bare, encrypt=encrypt).put_many([(b"c%d" % encrypt, text)]) == 1
    (hidden,) = (bytes(x) for name, x in bare.scan(b"c1"))
    (plain,) = (bytes(x) for name, x in bare.scan(b"c0"))
    assert text in plain and text[:16] not in hidden
    (blob,) = sealed(bare, encrypt=True).get_many([b"c1"])
    assert blob == text


def test_the_registry_seals_what_leaves_the_process(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    config = StoreConfig(ram_bytes=MIB, disk_bytes=8 * MIB, secret_file=str(secret))
    tiers = open_tiers(config, tmp_path)
    assert [type(x) for x in tiers][1] is SealedTier and not isinstance(tiers[0], SealedTier)
    for tier in tiers:
        tier.close()
    for bad in (b"short", None):
        if bad is None:
            secret.unlink()
        else:
            secret.write_bytes(bad)
        with pytest.raises(ValueError, match="secret_file"):
            open_tiers(config, tmp_path)
    with pytest.raises(ValueError, match="encrypt"):
        open_tiers(StoreConfig(encrypt=True), tmp_path)


def test_an_older_blob_put_back_costs_at_most_a_longer_prefill(rig: Rig, bare: Tier) -> None:
    """Its seal is right. What holds rows is named by its tokens, so only a record can be older."""
    store = rig.open([sealed(bare)])
    rig.save(store, ref(), LONG)
    older = {name: bytes(blob) for name, blob in bare.scan(b"")}
    rig.save(store, ref(), LONGER)
    newer = {name: bytes(blob) for name, blob in bare.scan(b"")}
    changed = [name for name, blob in older.items() if newer.get(name, blob) != blob]
    assert changed and all(name.startswith(b"r") for name in changed)
    for name, blob in older.items():
        bare.delete_many([name])
        assert bare.replace(name, blob)
    again = rig.open([sealed(bare)])  # as after a restart: it reads the tier
    back = rig.back(again, ref(), LONGER)  # compares every row
    assert 0 < back.num_tokens <= len(LONGER)
    fork = rig.back(again, ref(), FORK)
    assert fork.num_tokens <= 48
