"""Two servers on one Redis, each with what it learned itself: one reads what the other packed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from kvstore.blobs.chain import profile_key
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.config import StoreConfig
from kvstore.ledger import profiles
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Restored
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.redis_server.redis_tier import name_of
from kvstore.tiers.registry import open_tiers
from kvstore.tiers.seal import Seal, SealedTier
from tests import kv_sessions
from tests.contract.store_rig import LONG, MIB, WHOLE, Rig, history, ref
from tests.redis_server import RedisServer
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_run, ropes_of

pytestmark = pytest.mark.redis
SEAL = Seal(bytes(32), "shared", encrypt=False)
LAYOUT = model_layout()
FINGERPRINT = "f1"
LONGER = [*LONG, *history(60, 3)]


@functools.cache
def learned(seed: int) -> Profile:
    texts = [model_run(LAYOUT, 200, seed=seed)]
    return learn_profile(Samples(LAYOUT, ropes_of(LAYOUT), texts), FINGERPRINT, ["dense3"])


def codecs_of(profile: Profile) -> StoreCodecs:
    return StoreCodecs(open_codec("dense3", profile), profile=profile)


THEIRS, OURS = 1, 2


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def key_of(seed: int) -> bytes:
    return profile_key(FINGERPRINT, codecs_of(learned(seed)).rows.id)


def engine(rig: Rig, server: RedisServer, seed: int, *local: Tier) -> ColdStore:
    config = StoreConfig(ram_bytes=0, disk_bytes=0, redis_url=server.url, redis_deadline_s=5.0)
    (shared,) = open_tiers(config, Path("/nonexistent"))
    tiers = [RamTier(64 * MIB), *local, SealedTier(shared, SEAL)]
    store = rig.open(tiers, codecs=codecs_of(learned(seed)), layout=LAYOUT)
    store.ledger.profiles.opened = codecs_of
    assert store.flush(60)
    return store


def wake(
    store: ColdStore, tokens: list[int] = LONG, out: kv_sessions.Rows | None = None
) -> Restored:
    return store.restore(store.match(ref(), kv_sessions.chain_of(store, ref(), tokens)), out=out)


def save(store: ColdStore, tokens: list[int] = LONG, restored: int = 0) -> kv_sessions.Rows:
    run = model_run(LAYOUT, len(tokens), seed=9)
    return kv_sessions.save(store, ref(), tokens, run=run, restored_tokens=restored)


def same(one: Restored, other: Restored) -> bool:
    pairs = zip(one.run, other.run, strict=True)
    return all(np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def test_a_server_fetches_the_profile_that_it_lacks_and_reads_on(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    theirs, ours_disk = engine(rig, server, THEIRS), DiskTier(tmp_path, 64 * MIB)
    save(theirs)
    ours = engine(rig, server, OURS, ours_disk)
    assert ours.codecs.rows.id != theirs.codecs.rows.id
    woken = wake(ours)
    assert (woken.num_tokens, woken.tier, woken.reason) == (WHOLE, "redis", None)
    assert woken.lossy_tokens == WHOLE
    assert same(woken, wake(theirs))
    # It is kept, and goes on in this server's own codec: nothing is packed twice.
    assert ours_disk.contains_many([key_of(THEIRS)]) == [True]
    more = save(ours, LONGER, restored=WHOLE)
    assert [x.first_token for x in more.packed] == list(range(WHOLE, len(LONGER) // 16 * 16, 16))
    assert wake(theirs, LONGER).num_tokens == wake(ours, LONGER).num_tokens == WHOLE + 64


def test_a_second_reading_has_arrays_of_its_own(rig: Rig, server: RedisServer):
    """Threads of the first one may be late, and write to those of the caller."""
    theirs = engine(rig, server, THEIRS)
    save(theirs)
    ours = engine(rig, server, OURS)
    first, second = LAYOUT.empty(WHOLE), LAYOUT.empty(WHOLE)
    woken = wake(ours, out=first)
    assert woken.num_tokens == WHOLE and woken.run is not first
    for pair in first:
        for array in pair:
            array[:] = 1
    assert same(woken, wake(theirs))
    assert wake(ours, out=second).run is second  # the profile is known now


def test_both_renew_the_life_of_a_profile_while_it_is_in_use(rig: Rig, server: RedisServer):
    theirs = engine(rig, server, THEIRS)
    save(theirs)
    name = name_of(key_of(THEIRS) + SEAL.key_name)
    with redis.Redis.from_url(server.url) as client:
        assert client.pttl(name) > 0
        client.delete(name)  # evicted
        theirs.ledger.profiles.renew()
        assert client.exists(name)
        ours = engine(rig, server, OURS)
        assert wake(ours).num_tokens == WHOLE
        theirs.close()
        client.pexpire(name, 50_000)
        ours.ledger.profiles.renew()
        assert client.pttl(name) > 50_000


def test_what_cannot_be_read_is_held_and_not_saved_again(rig: Rig, server: RedisServer):
    theirs = engine(rig, server, THEIRS)
    save(theirs)
    ours = engine(rig, server, OURS)
    ours.ledger.profiles.opened = lambda profile: None
    for _ in range(2):
        woken = wake(ours)
        assert (woken.num_tokens, woken.reason) == (0, "fingerprint")
        assert save(ours).packed == []
    longer = save(ours, LONGER)
    assert longer.packed[0].first_token == WHOLE
    assert wake(theirs).num_tokens == WHOLE
    assert "corrupt" not in ours.counters.as_dict()


def changed(profile: bytes) -> bytes:
    return profile[:-40] + bytes([profile[-40] ^ 1]) + profile[-39:]


@pytest.mark.parametrize(
    "forged",
    [
        lambda: b"TCPF" + bytes(100),
        lambda: changed(learned(THEIRS).to_bytes()),
        lambda: learned(OURS).to_bytes(),
    ],
    ids=["no profile", "a changed profile", "another profile"],
)
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_forged_profile_is_refused_and_costs_a_miss(
    forged, is_sealed, rig: Rig, server: RedisServer
):
    """Even sealed, as only a server of the same secret could."""
    theirs = engine(rig, server, THEIRS)
    save(theirs)
    ours, key = engine(rig, server, OURS), key_of(THEIRS)
    shared = ours.ledger.stack.tiers[-1]
    assert isinstance(shared, SealedTier)
    if is_sealed:
        assert shared.replace(key, forged())
    else:
        assert shared._inner.replace(key + SEAL.key_name, forged())
    woken = wake(ours)
    assert (woken.num_tokens, woken.reason) == (0, "fingerprint")
    assert ours.counters.as_dict()["corrupt"] == 1
    assert shared.contains_many([key]) == [False]  # its owner writes it again
    assert save(ours).packed == []


def test_a_profile_of_an_absurd_size_is_not_read(rig: Rig, server: RedisServer, monkeypatch):
    theirs = engine(rig, server, THEIRS)
    save(theirs)
    ours = engine(rig, server, OURS)
    monkeypatch.setattr(profiles, "MAX_PROFILE_BYTES", 1000)
    woken = wake(ours)
    assert (woken.num_tokens, woken.reason) == (0, "fingerprint")


def test_after_a_restart_the_profile_on_the_disk_is_enough(rig: Rig, tmp_path: Path):
    """A server that meanwhile learned another one reads what it packed before."""

    def life(seed: int) -> ColdStore:
        disk = DiskTier(tmp_path, 64 * MIB)
        store = rig.open([RamTier(MIB), disk], codecs=codecs_of(learned(seed)), layout=LAYOUT)
        store.ledger.profiles.opened = codecs_of
        return store

    store = life(THEIRS)
    save(store)
    store.close()
    store = life(OURS)
    assert wake(store).num_tokens == WHOLE
