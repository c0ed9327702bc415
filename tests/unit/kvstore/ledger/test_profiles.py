"""Profiles of codecs in the tiers: renewed, fetched, and ended with the store."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence

import pytest

from kvstore.blobs.chain import profile_key
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.ledger import profiles
from kvstore.ledger.profiles import MOST, Profiles
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from tests.clock import Clock
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import RenamedRam
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_run, ropes_of

LAYOUT, MODEL = model_layout(), "f1"


@functools.cache
def learned(seed: int) -> Profile:
    texts = [model_run(LAYOUT, 100, seed=seed)]
    return learn_profile(Samples(LAYOUT, ropes_of(LAYOUT), texts), MODEL, ["dense3"])


def codecs_of(profile: Profile) -> StoreCodecs:
    return StoreCodecs(open_codec("dense3", profile), profile=profile)


def id_of(seed: int) -> str:
    return codecs_of(learned(seed)).rows.id


class Rig:
    """The profiles of a store with two tiers, of which one has some of other stores."""

    def __init__(self, *seeds: int, nbytes: int = 1 << 26) -> None:
        self.tier = FaultyTier(RenamedRam(nbytes))
        self.clock = Clock()
        self.readable: list[Sequence[StoreCodecs]] = []
        for seed in seeds:
            item = profile_key(MODEL, id_of(seed)), learned(seed).to_bytes()
            assert self.tier.put_many([item]) == 1
        stack = TierStack([self.tier, RenamedRam(nbytes)], Counters())
        self.profiles = Profiles(stack, MODEL, self.readable.append, self.clock)
        self.profiles.opened = codecs_of


@pytest.fixture
def opening() -> Iterator[threading.Event]:
    """Set: opening a profile does not take for ever."""
    goes_on = threading.Event()
    yield goes_on
    goes_on.set()


def held(rig: Rig, goes_on: threading.Event) -> threading.Event:
    """Have opening wait; the returned event says that it does."""
    begun = threading.Event()

    def opened(profile: Profile) -> StoreCodecs:
        begun.set()
        goes_on.wait(60)
        return codecs_of(profile)

    rig.profiles.opened = opened
    return begun


def test_no_request_waits_for_kernels_of_another_servers_codec(opening, monkeypatch):
    rig = Rig(1)
    held(rig, opening)
    monkeypatch.setattr(profiles, "FETCH_S", 0.01)
    assert not rig.profiles.fetch([id_of(1)], 60)
    assert not rig.profiles.is_refused(id_of(1))
    rig.clock.now += 1  # the next one waits no more
    monkeypatch.setattr(profiles, "FETCH_S", 0.5)
    assert not rig.profiles.fetch([id_of(1)], 60)
    opening.set()
    monkeypatch.setattr(profiles, "FETCH_S", 60)
    assert rig.profiles.fetch([id_of(1)], 60)  # for the next return


def test_more_may_be_asked_for_at_once_than_are_remembered(monkeypatch):
    rig = Rig()
    monkeypatch.setattr(profiles, "MAX_ASKED", 2)
    ids = [id_of(x) for x in range(4)]
    assert rig.profiles.fetch(ids, 60)  # it is known of all that there are none


def test_a_closed_one_fetches_nothing_and_raises_nothing():
    rig = Rig(1)
    rig.profiles.close()
    assert not rig.profiles.fetch([id_of(1)], 60)
    assert not rig.profiles.is_refused(id_of(1))
    assert not rig.readable


def test_closing_ends_a_fetch_that_waits_for_another_one(opening, monkeypatch):
    rig = Rig(1, 2)
    begun = held(rig, opening)
    monkeypatch.setattr(profiles, "CLOSE_S", 0.05)
    assert not rig.profiles.fetch([id_of(1)], 0.0)
    answers: list[bool] = []
    monkeypatch.setattr(profiles, "FETCH_S", 60)
    asking = threading.Thread(target=lambda: answers.append(rig.profiles.fetch([id_of(2)], 60)))
    assert begun.wait(20)
    asking.start()
    while id_of(2) not in rig.profiles._asked:
        asking.join(0.01)
    rig.profiles.close()  # although kernels are still being compiled
    asking.join(20)
    assert answers == [False]
    assert not rig.profiles.is_refused(id_of(2))
    opening.set()
    rig.profiles._fetching.shutdown()
    assert not rig.readable  # the store is closed
    assert not rig.profiles.is_refused(id_of(1))  # or a last return would drop good copies


class Counted(Profile):
    """Counts how often it is made into bytes."""

    made = 0

    def _blocks(self) -> Iterator[bytes | memoryview]:
        Counted.made += 1
        return super()._blocks()


def keep_counted(rig: Rig) -> bytes:
    """Returns the key of the profile."""
    own = learned(1)
    counted = Counted(own.fingerprint, own.layout, own.ropes, own.learned, own.rows)
    Counted.made = 0
    rig.profiles.keep(codecs_of(counted))
    return profile_key(MODEL, id_of(1))


def renew_for_an_hour(rig: Rig) -> None:
    for _ in range(240):
        rig.profiles.renew()
        rig.clock.now += 15


def test_a_tier_that_never_takes_a_profile_is_seldom_asked_to():
    rig = Rig(nbytes=100)
    keep_counted(rig)
    renew_for_an_hour(rig)
    assert 4 <= rig.tier.calls.count("put_many") <= 8
    assert Counted.made == rig.tier.calls.count("put_many")  # once for both tiers


def test_a_tier_that_is_down_gets_the_profile_once_it_answers():
    rig = Rig()
    key = keep_counted(rig)
    rig.tier.fails = lambda number, method: True
    renew_for_an_hour(rig)
    assert (rig.tier.calls.count("put_many"), Counted.made) == (0, 1)  # for the other tier
    assert rig.profiles.nbytes(0) == 0 < rig.profiles.nbytes(1)
    rig.tier.fails = lambda number, method: False
    rig.profiles.renew()
    assert rig.tier.contains_many([key]) == [True]
    assert [rig.profiles.nbytes(0)] == rig.tier.lengths([key])


def test_of_codecs_of_other_stores_the_oldest_are_released(opened):
    seeds = range(1, MOST + 3)
    rig = Rig(*seeds)
    store = opened([rig.tier.inner], codecs=codecs_of(learned(0)), layout=LAYOUT)
    fetched = store.ledger.profiles
    fetched.opened = codecs_of
    for seed in seeds:
        assert fetched.fetch([id_of(seed)], 60)
    own, newest = [id_of(0)], [id_of(x) for x in seeds[2:]]
    assert sorted(store.packer.readable) == sorted(own + newest)
    assert fetched.fetch([id_of(1)], 60)  # it is in use again
    store.adopt(StoreCodecs(codecs_of(learned(0)).rows))
    assert sorted(store.packer.readable) == sorted([*own, id_of(1), *newest[1:]])
    assert profile_key(MODEL, id_of(0)) in fetched._kept
