"""Engines of one secret share profiles over a real Redis; an error in one costs no more than
a measurement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis

from engines.calibration.first_order import first_order
from engines.calibration.fleet_profiles import FleetProfiles, open_sharing
from engines.calibration.gate.profiles import origin, profile_path
from engines.calibration.gate.served_codecs import MeasuredModel, ServedCodecs
from engines.calibration.self_measurement import SelfMeasurement, Wanted
from engines.config import CalibrationOrder
from kvstore.codecs.profile import load_profile
from kvstore.config import StoreConfig
from kvstore.published import PublishedNames, Shelf
from kvstore.shapes import KVRun
from kvstore.tiers.redis_server.link import RedisLink
from tests.redis_server import RedisServer
from tests.unit.engines.calibration.test_self_measurement import WITHIN_S, Talking
from tests.unit.kvstore.codecs.learning.calibration import model_run

pytestmark = pytest.mark.redis

SECRET, OTHER = b"s" * 32, b"o" * 32


def quick_order(config: StoreConfig, data: Path) -> CalibrationOrder:
    order = first_order(config, 300, str(data))
    few = {"presets": ("dense3", "balanced"), "num_windows": 2, "num_chains": 0, "depths": ()}
    return msgspec.structs.replace(order, **few)


class Engine:
    """An engine's half of it: codecs, a share in the fleet, and one measurement after the other."""

    def __init__(self, data: Path, url: str, name: str, secret: bytes, **config: float) -> None:
        self.instrument, self.data = Talking(), data
        self.config = StoreConfig(disk_bytes=0, redis_url=url, **config)  # type: ignore[arg-type]
        self.codecs = ServedCodecs(
            self.config, self.instrument.layout, self.instrument.fingerprint, data
        )
        names = PublishedNames(secret, self.codecs.fingerprint, self.codecs.layout)
        link = RedisLink(url, 5.0)
        self.sharing = FleetProfiles(Shelf(link, names), self.codecs, self.config, data, name)

    def start(self) -> str:
        """Measure, or take over; returns where the profile comes from."""
        measurement = SelfMeasurement(
            quick_order(self.config, self.data),
            lambda: self.instrument,
            lambda: self.codecs.renew(lambda codecs, *, keep: None),
            engine="none",
            resumes=True,
            wanted=Wanted(lambda: self.codecs.report.unmeasured),
            sharing=self.sharing,
        )
        measurement.join(WITHIN_S)
        assert not measurement.is_running
        assert not self.codecs.report.unmeasured
        return self.codecs.report.origin


@contextmanager
def engine(
    folder: Path, server: RedisServer, name: str, secret: bytes = SECRET, **config: float
) -> Iterator[Engine]:
    found = Engine(folder / name, server.url, name, secret, **config)
    try:
        yield found
    finally:
        found.sharing.close()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of an engine that has measured."""
    folder = tmp_path_factory.mktemp("measured")
    with RedisServer() as own, engine(folder, own, "one") as one:
        assert one.start() == "learned here"
        return profile_path(one.data, one.codecs.fingerprint)


def begun(folder: Path, server: RedisServer, measured: Path, name: str = "one") -> Engine:
    """An engine that has that profile at its start."""
    path = folder / name / "profiles" / measured.name
    path.parent.mkdir(parents=True)
    path.write_bytes(measured.read_bytes())
    return Engine(folder / name, server.url, name, SECRET)


@pytest.fixture
def one(
    tmp_path: Path, server: RedisServer, client: redis.Redis, measured: Path
) -> Iterator[Engine]:
    """An engine that has published."""
    one = begun(tmp_path, server, measured)
    one.sharing.publish()
    yield one
    one.sharing.close()


def test_another_engine_takes_over_the_profile_that_the_first_has_published(
    one: Engine, tmp_path: Path, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with engine(tmp_path, server, "two") as two:
        assert two.start() == "shared by one"
        assert two.codecs.report.id == one.codecs.report.id
        assert two.codecs.report.tiers == one.codecs.report.tiers
        assert two.instrument.num_prefills <= 4, "two texts, and no more"
        assert 0 < two.instrument.num_answers <= 2 * (1 + len(set(two.codecs.report.tiers)))
        assert two.sharing.publish(), "its profile is the published one"
        assert not [x for x in (tmp_path / "two" / "profiles").iterdir() if ".public" in x.name]
    assert "packs by the profile that one has published" in caplog.text
    again = ServedCodecs(two.config, two.codecs.layout, two.codecs.fingerprint, two.data)
    assert again.report.origin == "shared by one", "also after a restart"
    assert origin(one.data, one.codecs.fingerprint) == "learned here"


def damage(client: redis.Redis, part: bytes) -> None:
    name = next(x for x in client.keys("*") if x.endswith(part))  # type: ignore[union-attr]
    raw = bytearray(client.get(name) or b"")  # type: ignore[arg-type]
    raw[len(raw) // 2] ^= 1
    client.set(name, bytes(raw))


@pytest.mark.parametrize("part", [b":first", b":0"])
def test_a_damaged_profile_costs_a_measurement_and_is_replaced(
    part: bytes,
    one: Engine,
    client: redis.Redis,
    tmp_path: Path,
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    damage(client, part)
    with engine(tmp_path, server, "two") as two:
        assert two.start() == "learned here"
        assert "another engine published is damaged: not sealed by this server" in caplog.text
        tiers = [x.codecs.report.tiers for x in (one, two)]
        assert tiers[0]["redis"] == tiers[1]["redis"], "learned alike; memory's goes by times"
    with engine(tmp_path, server, "three") as three:
        assert three.start() == "shared by two"


def test_a_profile_of_another_secret_is_none(
    one: Engine, client: redis.Redis, tmp_path: Path, server: RedisServer
) -> None:
    with engine(tmp_path, server, "two", OTHER) as two:
        assert two.start() == "learned here"
    assert len({x.split(b":")[3] for x in client.keys("*")}) == 2, "each has its own"  # type: ignore[union-attr]


def test_a_profile_of_another_model_under_our_name_is_refused(
    one: Engine,
    client: redis.Redis,
    tmp_path: Path,
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As by an engine with the secret and a defect."""
    with engine(tmp_path, server, "two") as two:
        two.codecs.measured = MeasuredModel("another model", two.codecs.layout)
        taken = two.sharing.take_over(
            two.instrument, quick_order(two.config, two.data), lambda _: None,
            learned_on=False,
        )  # fmt: skip
        assert not taken and "does not serve here: it is of another model" in caplog.text


class Unlike(Talking):
    """An engine that makes something else of KV that was packed."""

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        found = super().log_probs(run, tokens)
        return found if self.num_answers % 2 else np.roll(found, 1, axis=1)


def test_a_profile_that_does_not_pass_here_costs_a_measurement(
    one: Engine,
    client: redis.Redis,
    tmp_path: Path,
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = sorted(client.keys("*"))  # type: ignore[type-var]
    with engine(tmp_path, server, "two") as two:
        two.instrument = Unlike()
        assert two.start() == "learned here"
        assert "one has published does not serve here" in caplog.text
        assert "KL of" in caplog.text
    assert sorted(client.keys("*")) == before, "others' is left as it was"  # type: ignore[type-var]


def test_without_redis_it_measures(
    tmp_path: Path, measured: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with RedisServer() as own:
        one = begun(tmp_path, own, measured)
        one.sharing.publish()
        own.kill()
        with engine(tmp_path, own, "two") as two:
            assert two.start() == "learned here"
            assert "no profile of another engine is to be had" in caplog.text
            own.start()
            with redis.Redis.from_url(own.url) as client:
                while not client.dbsize():  # as its keeper does, once Redis is asked again
                    assert two.sharing.publish()
                    time.sleep(0.05)
        with engine(tmp_path, own, "three") as three:
            assert three.start() == "shared by two"
        one.sharing.close()


class Different(Talking):
    """Learns other tables; calls ``meanwhile`` when it has looked for a profile, once."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        if not self.num_prefills:
            self._meanwhile()
        if len(set(tokens)) == 1:
            return super().prefill(tokens, past)
        self.num_prefills += 1
        return model_run(self.layout, len(tokens), seed=tokens[0] + 1000)


def test_two_that_learn_at_once_end_with_one(
    tmp_path: Path, server: RedisServer, client: redis.Redis, measured: Path
) -> None:
    first: list[Engine] = []

    def other_publishes() -> None:
        first.append(begun(tmp_path, server, measured))
        assert first[0].sharing.publish()

    with engine(tmp_path, server, "two") as two:
        two.instrument = Different(other_publishes)
        assert two.start() == "shared by one"
        path = profile_path(two.data, two.codecs.fingerprint)
        known, published = load_profile(path), load_profile(measured)
        assert {x: known.ids[x] for x in published.ids} == published.ids
        own = {x.removeprefix("before:") for x in known.ids if x.startswith("before:")}
        assert own == set(published.ids), "its earlier blobs can be read"
    first[0].sharing.close()


def test_without_redis_or_secret_nothing_is_shared(tmp_path: Path) -> None:
    codecs = ServedCodecs(StoreConfig(), Talking().layout, "no model", tmp_path)
    (tmp_path / "secret").write_bytes(SECRET)
    secret = {"secret_file": str(tmp_path / "secret")}
    assert open_sharing(StoreConfig(**secret), codecs, tmp_path) is None  # type: ignore[arg-type]
    url = {"redis_url": "redis://127.0.0.1:1"}
    assert open_sharing(StoreConfig(**url), codecs, tmp_path) is None  # type: ignore[arg-type]
    both = open_sharing(StoreConfig(**secret, **url), codecs, tmp_path)  # type: ignore[arg-type]
    assert isinstance(both, FleetProfiles)
    both.close()
