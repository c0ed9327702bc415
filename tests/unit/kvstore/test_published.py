"""Profiles on a real Redis: whole, and sealed by the engines' secret, or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from kvstore.errors import Corrupt, TierUnavailable
from kvstore.published import (
    MAX_BYTES,
    MAX_NOTICE_BYTES,
    PIECE_BYTES,
    TTL_MS,
    UNFINISHED_MS,
    Publication,
    PublishedNames,
    Shelf,
    described,
)
from kvstore.shapes import KVLayer, KVLayout
from kvstore.tiers.redis_server.link import RedisLink
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis

SECRET, OTHER = b"s" * 32, b"o" * 32
LAYOUT = KVLayout("bfloat16", (KVLayer(2, 64, 64),))
NAMES = PublishedNames(SECRET, "a model", LAYOUT)


@pytest.fixture
def shelf(server: RedisServer, client: redis.Redis) -> Iterator[Shelf]:
    shelf = Shelf(RedisLink(server.url, 5.0), NAMES)
    yield shelf
    shelf.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Ten pieces, the last of which is short."""
    path = tmp_path / "profile"
    path.write_bytes(os.urandom(9 * PIECE_BYTES + 77))
    return path


def published(shelf: Shelf, file: Path, *, anew: bool = False) -> Publication:
    publication = described(file, "one", {"dense3": "0123456789"})
    assert shelf.publish("first", publication, file, anew=anew)
    return publication


def test_others_get_the_published_file(shelf: Shelf, file: Path, tmp_path: Path):
    assert shelf.look("first") is None
    publication = published(shelf, file)
    assert shelf.look("first") == publication and shelf.look("further") is None
    shelf.fetch("first", publication, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == file.read_bytes()


def test_the_first_one_stays(shelf: Shelf, file: Path, tmp_path: Path):
    first = published(shelf, file)
    (tmp_path / "other").write_bytes(b"other")
    second = described(tmp_path / "other", "two", {})
    assert not shelf.publish("first", second, tmp_path / "other", anew=False)
    assert shelf.look("first") == first
    assert shelf.publish("first", second, tmp_path / "other", anew=True)
    assert shelf.look("first") == second


@pytest.mark.parametrize(
    "names",
    [
        PublishedNames(OTHER, "a model", LAYOUT),
        PublishedNames(SECRET, "another model", LAYOUT),
        PublishedNames(SECRET, "a model", KVLayout("float16", LAYOUT.layers)),
        PublishedNames(SECRET, "a model", KVLayout("bfloat16", LAYOUT.layers * 2)),
    ],
    ids=["secret", "model", "dtype", "layout"],
)
def test_of_another_secret_model_dtype_or_layout_is_none(
    names: PublishedNames, server: RedisServer, shelf: Shelf, file: Path
):
    published(shelf, file)
    other = Shelf(RedisLink(server.url, 5.0), names)
    assert other.look("first") is None
    other.close()


def flip(client: redis.Redis, name: bytes) -> None:
    raw = bytearray(client.get(name) or b"")  # type: ignore[arg-type]
    raw[len(raw) // 2] ^= 1
    client.set(name, bytes(raw))


def swap(client: redis.Redis, name: bytes) -> None:
    other = next(x for x in client.keys("*") if x != name and x[-1:] != name[-1:])  # type: ignore[union-attr]
    client.set(name, client.get(other))  # type: ignore[arg-type]


DAMAGES: dict[str, Callable[[redis.Redis, bytes], object]] = {
    "a flipped bit": flip,
    "another one in its place": swap,
    "cut": lambda client, name: client.set(name, client.getrange(name, 0, 40)),
    "longer": lambda client, name: client.append(name, b"x"),
    "much longer": lambda client, name: client.setrange(name, 1 << 20, b"x"),
    "another type": lambda client, name: (client.delete(name), client.lpush(name, b"x")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_publication_is_noticed_and_written_over(
    damage: Callable[[redis.Redis, bytes], object],
    client: redis.Redis,
    shelf: Shelf,
    file: Path,
    tmp_path: Path,
):
    publication = published(shelf, file)
    damage(client, NAMES.pieces("first", publication)[4])
    with pytest.raises(Corrupt):
        shelf.fetch("first", publication, tmp_path / "fetched")
    damage(client, NAMES.notice("first"))
    with pytest.raises(Corrupt):
        shelf.look("first")
    assert not shelf.publish("first", publication, file, anew=False)
    published(shelf, file, anew=True)
    shelf.fetch("first", publication, tmp_path / "fetched")


def test_a_piece_that_was_evicted_is_noticed(
    client: redis.Redis, shelf: Shelf, file: Path, tmp_path: Path
):
    publication = published(shelf, file)
    assert shelf.refresh("first", publication)
    client.delete(NAMES.pieces("first", publication)[9])
    assert not shelf.refresh("first", publication)
    with pytest.raises(Corrupt, match="piece 10 of 10 is missing"):
        shelf.fetch("first", publication, tmp_path / "fetched")


def test_all_of_it_expires_a_while_after_the_last_engine(
    client: redis.Redis, shelf: Shelf, file: Path
):
    publication = published(shelf, file)
    names = [NAMES.notice("first"), *NAMES.pieces("first", publication)]
    assert sorted(names) == sorted(client.keys("*"))  # type: ignore[type-var]
    for name in names:
        client.pexpire(name, 1000)
    assert shelf.refresh("first", publication)
    assert min(client.pttl(x) for x in names) > TTL_MS - 60_000  # type: ignore[type-var]


def test_pieces_of_who_was_not_first_expire_soon(client: redis.Redis, shelf: Shelf, file: Path):
    """As if another engine had published meanwhile."""
    publication = described(file, "one", {})

    class Late(Shelf):
        def _run(self, commands):  # type: ignore[no-untyped-def]
            replies = super()._run(commands)
            if commands[0][0] == "EXISTS":
                client.set(NAMES.notice("first"), b"another")
            return replies

    assert not Late(shelf._link, NAMES).publish("first", publication, file, anew=False)
    left = NAMES.pieces("first", publication)
    assert all(0 < client.pttl(x) <= UNFINISHED_MS for x in left)  # type: ignore[operator]


def test_a_file_that_is_too_large_is_refused(tmp_path: Path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match="more than 256"):
        described(tmp_path / "large", "one", {})


def test_the_notice_is_bounded(shelf: Shelf, client: redis.Redis, file: Path):
    """By the seal's own engine as well: it may be of a release that says more."""
    notice = NAMES.notice("first")
    client.set(notice, NAMES.close(notice, b"\xc1" * 100))
    with pytest.raises(Corrupt, match="not to be read"):
        shelf.look("first")
    client.set(notice, NAMES.close(notice, b"x" * MAX_NOTICE_BYTES))
    with pytest.raises(Corrupt):
        shelf.look("first")
    assert len(described(file, "m" * 1000, {}).by) == 100


def test_without_redis_it_says_so(file: Path, tmp_path: Path):
    with RedisServer() as own:
        shelf = Shelf(RedisLink(own.url, 1.0), NAMES)
        publication = published(shelf, file)
        own.kill()
        with pytest.raises(TierUnavailable):
            shelf.look("first")
        with pytest.raises(TierUnavailable):
            shelf.fetch("first", publication, tmp_path / "fetched")
        with pytest.raises(TierUnavailable):
            shelf.publish("first", publication, file, anew=False)
        shelf.close()
