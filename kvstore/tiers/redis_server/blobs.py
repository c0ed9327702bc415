"""Writes, reads and removes whole blobs on a Redis server; no reader sees half a blob.

Each method is one exchange with the server, or a few; every one may raise ``TierUnavailable``. A
write that the server refuses (out of memory and not allowed to evict, a read-only replica, an
access rule) concerns its own blob only and is counted as an error. A refused read or removal (part
of a cluster is down, an access rule) raises: the blob may be there, or stay there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import Corrupt, TierUnavailable
from kvstore.tiers.base import Blob
from kvstore.tiers.redis_server.book import Book, Written
from kvstore.tiers.redis_server.fragments import (
    MANIFEST_BYTES,
    BlobManifest,
    cut,
    entry_names,
    fragment_names,
    manifest_name,
    new_manifest,
    parse_manifest,
    parse_manifest_name,
    scan_pattern,
    verified,
)
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.redis_server.servers import THEN, Command, Reply

BATCH_BYTES = 4 << 20  # of blobs that are sent together
BATCH_KEYS = 256
UNFINISHED_S = 600  # fragments whose manifest never came expire by themselves
SCAN_COUNT = 1000
MAX_SCANS = 2000  # a bound on the work, two million entries

# Removes entries of a blob, unless a writer has put a new manifest in its place.
_REMOVE_IF_SAME = (
    "if redis.call('getrange', KEYS[1], 0, #ARGV[1] - 1) == ARGV[1] then "
    "return redis.call('unlink', unpack(KEYS)) end return 0"
)


class WriteInterrupted(TierUnavailable):
    """The server failed while these were written: they may exist, or may appear later.

    A command that was sent is carried out, even if the caller no longer waits for its reply.
    """

    def __init__(self, error: TierUnavailable, manifests: Mapping[bytes, BlobManifest]) -> None:
        super().__init__(*error.args)
        self.manifests = manifests


@dataclass
class _ReadProgress:
    """The blobs that one ``read`` has found so far, and the damaged ones that it must remove."""

    until: float  # the moment at which the read must be over
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    removals: list[Command] = field(default_factory=list)
    refusal: TierUnavailable | None = None  # the last one

    def remove(self, names: Sequence[bytes], manifest: bytes) -> None:
        """Queue a damaged blob's removal: while its manifest exists, it is not stored again."""
        self.removals.append(("EVAL", _REMOVE_IF_SAME, len(names), *names, manifest))


class RedisBlobs:
    """The blobs on one server. Thread-safe; keeps no data in memory.

    Args:
        ttl_ms: entries expire this long after they were written or touched; 0 = never.
        book: the list of our own blobs; None = there is none.
    """

    def __init__(self, link: RedisLink, ttl_ms: int, book: Book | None = None) -> None:
        self._link = link
        self._ttl_ms = ttl_ms
        self._book = book

    def exist(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Return for each key whether its manifest exists; None where the server refused.

        Raises:
            TierUnavailable: it refused all of them, or did not answer.
        """
        replies = self._link.run([("EXISTS", manifest_name(key)) for key in keys])
        found = [None if self._is_refusal(reply) else reply == 1 for reply in replies]
        if found and all(x is None for x in found):
            raise TierUnavailable(f"redis tier: {replies[0]}")
        return found

    def manifests(self, keys: Sequence[bytes]) -> dict[bytes, BlobManifest]:
        """Return the manifests of the keys that have a readable one."""
        commands = [("GETRANGE", manifest_name(key), 0, MANIFEST_BYTES - 1) for key in keys]
        found: dict[bytes, BlobManifest] = {}
        for key, raw in zip(keys, self._link.run(commands), strict=True):
            try:
                found[key] = parse_manifest(self._content(raw))
            except Corrupt:
                continue
        return found

    def _answer(self, reply: Reply) -> Reply:
        """Return a reply that is no refusal; else count it, and raise ``TierUnavailable``."""
        if self._is_refusal(reply):
            raise TierUnavailable(f"redis tier: {reply}")
        return reply

    def _content(self, reply: Reply) -> bytes:
        """Return an entry's bytes; empty if it is missing, or of a type that no blob has."""
        if _is_error(reply) and str(reply).startswith("WRONGTYPE"):
            return b""
        return _value(self._answer(reply))

    # Reading

    def read(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the blobs that are whole, as far as they arrived within one deadline.

        Damaged ones are removed from the server.

        Raises:
            TierUnavailable: the server failed, or refused, before a single blob was read.
        """
        progress = _ReadProgress(self._link.deadline())
        try:
            for first in range(0, len(keys), BATCH_KEYS):
                manifests = self._read_manifests(keys[first : first + BATCH_KEYS], progress)
                for batch in _batches(
                    {key: manifest.length for key, manifest in manifests.items()}
                ):
                    self._read_fragments({key: manifests[key] for key in batch}, progress)
            if progress.removals:
                self._link.run(progress.removals)
        except TierUnavailable:
            if not progress.blobs:
                raise
        if progress.refusal and not progress.blobs:
            raise progress.refusal
        return progress.blobs

    def _read_content(self, reply: Reply, progress: _ReadProgress) -> bytes | None:
        """Return an entry's bytes, empty if it is missing; None if the server refused."""
        try:
            return self._content(reply)
        except TierUnavailable as error:
            progress.refusal = error
            return None

    def _read_manifests(
        self, keys: Sequence[bytes], progress: _ReadProgress
    ) -> dict[bytes, BlobManifest]:
        """Return manifests of blobs in fragments; small blobs come with theirs and are complete."""
        manifests: dict[bytes, BlobManifest] = {}
        replies = self._link.run([("GET", manifest_name(key)) for key in keys], progress.until)
        for key, reply in zip(keys, replies, strict=True):
            raw = self._read_content(reply, progress)
            if not raw:
                continue
            try:
                manifest = parse_manifest(raw)
                if manifest.num_fragments:
                    manifests[key] = manifest
                else:
                    progress.blobs[key] = verified(raw[MANIFEST_BYTES:], manifest)
            except Corrupt as error:
                self._link.count(str(error))
                progress.remove([manifest_name(key)], raw[:MANIFEST_BYTES])
        return manifests

    def _read_fragments(
        self, manifests: Mapping[bytes, BlobManifest], progress: _ReadProgress
    ) -> None:
        names = [
            name for key, manifest in manifests.items() for name in fragment_names(key, manifest)
        ]
        replies = iter(self._link.run([("GET", name) for name in names], progress.until))
        for key, manifest in manifests.items():
            taken = [next(replies) for _ in range(manifest.num_fragments)]
            fragments = [
                x for x in (self._read_content(y, progress) for y in taken) if x is not None
            ]
            if len(fragments) < len(taken):  # refused: the blob may be whole
                continue
            try:
                progress.blobs[key] = verified(b"".join(fragments), manifest)
            except Corrupt as error:
                if all(fragments):  # else the server evicted some, which is not an error
                    self._link.count(str(error))
                progress.remove(entry_names(key, manifest), manifest.pack())

    # Writing

    def write(self, blobs: Mapping[bytes, Blob]) -> Iterator[dict[bytes, BlobManifest]]:
        """Write blobs in order, replacing older ones; yield the manifests that each batch wrote.

        Raises:
            WriteInterrupted: the server failed.
        """
        for batch in _batches({key: len(blob) for key, blob in blobs.items()}):
            manifests = {key: new_manifest(blobs[key]) for key in batch}
            try:
                refused = self._write_batch(manifests, blobs)
            except TierUnavailable as error:
                raise WriteInterrupted(error, manifests) from error
            yield {key: manifest for key, manifest in manifests.items() if key not in refused}

    def _write_batch(
        self, manifests: Mapping[bytes, BlobManifest], blobs: Mapping[bytes, Blob]
    ) -> set[bytes]:
        """Write some blobs; return the keys that the server refused."""
        refused = self._write_fragments(manifests, blobs)
        wanted = [x for x in manifests if x not in refused]
        refused |= self._write_manifests(wanted, manifests, blobs)
        if refused:
            self.drop_fragments([(key, manifests[key]) for key in refused])
        return refused

    def _write_fragments(
        self, manifests: Mapping[bytes, BlobManifest], blobs: Mapping[bytes, Blob]
    ) -> set[bytes]:
        """Write all fragments; return the keys of which the server refused one."""
        expiry = self._ttl_ms or UNFINISHED_S * 1000
        owners: list[bytes] = []
        commands: list[Command] = []
        for key, manifest in manifests.items():
            for name, fragment in cut(key, manifest, blobs[key]):
                owners.append(key)
                commands.append(("SET", name, fragment, "PX", expiry))
        replies = self._link.run(commands) if commands else []
        return {x for x, reply in zip(owners, replies, strict=True) if self._is_refusal(reply)}

    def _write_manifests(
        self,
        keys: Sequence[bytes],
        manifests: Mapping[bytes, BlobManifest],
        blobs: Mapping[bytes, Blob],
    ) -> set[bytes]:
        """Make blobs visible whose fragments were written, and remove the fragments they replace.

        Returns the keys that the server refused.
        """
        booked = self._book.enter({key: manifests[key] for key in keys}) if self._book else []
        commands = [*booked, THEN]
        for key in keys:
            inline = b"" if manifests[key].num_fragments else blobs[key]
            entry = b"".join((manifests[key].pack(), inline))
            commands.append(("GETSET", manifest_name(key), entry))
        commands += [x for key in keys for x in self._expiry_commands(key, manifests[key])]
        replies = self._link.run(commands) if keys else []
        for reply in replies[: len(booked)]:
            self._is_refusal(reply)  # counted; the blobs are as good without the book
        refused: set[bytes] = set()
        replaced: dict[bytes, BlobManifest] = {}
        for key, old in zip(keys, replies[len(booked) :], strict=False):
            if self._is_refusal(old):
                refused.add(key)
            elif before := _replaced(_value(old)):
                replaced[key] = before
        self.drop_fragments(replaced.items())
        return refused

    def _expiry_commands(self, key: bytes, manifest: BlobManifest) -> Iterator[Command]:
        if self._ttl_ms:
            yield "PEXPIRE", manifest_name(key), self._ttl_ms
        else:
            yield from (("PERSIST", name) for name in fragment_names(key, manifest))

    def _is_refusal(self, reply: Reply) -> bool:
        if _is_error(reply):
            self._link.count(str(reply))
            return True
        return False

    def evict(self, manifests: Mapping[bytes, BlobManifest]) -> None:
        """Remove our blobs and their book entries; blobs that other writers put there stay."""
        commands: list[Command] = [
            ("EVAL", _REMOVE_IF_SAME, 1, manifest_name(key), manifest.pack())
            for key, manifest in manifests.items()
        ]
        replies = self._run_and_strike(commands, manifests.items())
        refused = [x for x, reply in zip(manifests, replies, strict=False) if _is_error(reply)]
        if refused:  # a server without scripts: a writer in between only loses its blob
            there = self.manifests(refused)
            same = [key for key in refused if there.get(key) == manifests[key]]
            self._link.run([("UNLINK", manifest_name(key)) for key in same])

    def drop_fragments(self, written: Iterable[Written]) -> None:
        """Remove the fragments of blobs that are not visible, and their book entries."""
        self._run_and_strike([], written)

    def _run_and_strike(
        self, commands: Sequence[Command], written: Iterable[Written]
    ) -> list[Reply]:
        """Run ``commands``, then remove the fragments and book entries of these blobs.

        Owed blobs are removed with them: the server has evicted their manifests, but not their
        fragments.
        """
        if self._book is None:
            every = [*commands, *_unlink_fragments(written)]
            return self._link.run(every) if every else []
        owed = self._book.take_owed()
        gone = [*written, *owed]
        every = [*commands, *_unlink_fragments(gone), THEN, *self._book.strike(gone)]
        try:
            return self._link.run(every) if len(every) > 1 else []
        except TierUnavailable:
            self._book.owe(owed)
            raise

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove blobs, also those with damaged manifests; return how many keys existed."""
        manifests = self.manifests(keys)
        by_name: list[Command] = [("UNLINK", manifest_name(key)) for key in manifests]
        replies = self._run_and_strike(by_name, manifests.items())
        others: list[Command] = [("UNLINK", manifest_name(x)) for x in keys if x not in manifests]
        removed = [*replies[: len(by_name)], *(self._link.run(others) if others else ())]
        return len([x for x in map(self._answer, removed) if x == 1])

    # Keeping and finding

    def touch(
        self, ours: Mapping[bytes, BlobManifest], others: Mapping[bytes, BlobManifest]
    ) -> None:
        """Restart the server's clocks for expiry and eviction; the last of each is the most recent.

        ``others``: blobs that are not in our book.
        """
        commands = self._book.enter(ours) if self._book else []
        for key, manifest in (*ours.items(), *others.items()):
            names = entry_names(key, manifest)
            if self._ttl_ms:
                commands += [("PEXPIRE", name, self._ttl_ms) for name in names]
            else:
                commands.append(("TOUCH", *names))
        if commands:
            self._link.run(commands)

    def find(self, prefix: bytes) -> list[bytes]:
        """Return the keys with ``prefix``, sorted; walks all keys of all servers."""
        found: set[bytes] = set()
        for server in self._link.servers():
            found.update(self._find_at(server, prefix))
        return sorted(found)

    def _find_at(self, server: object, prefix: bytes) -> Iterator[bytes]:
        cursor = b"0"
        for _ in range(MAX_SCANS):
            command = ("SCAN", cursor, "MATCH", scan_pattern(prefix), "COUNT", SCAN_COUNT)
            (reply,) = self._link.run([command], at=server)
            if self._is_refusal(reply):
                raise TierUnavailable(f"redis tier: {reply}")
            cursor, names = reply
            yield from (key for key in map(parse_manifest_name, names) if key is not None)
            if cursor == b"0":
                break


def _is_error(reply: Reply) -> bool:
    return isinstance(reply, Exception)


def _unlink_fragments(written: Iterable[Written]) -> list[Command]:
    listed = [fragment_names(key, manifest) for key, manifest in written]
    return [("UNLINK", *names) for names in listed if names]


def _value(reply: Reply) -> bytes:
    """Return an entry's bytes; empty if it is missing, which no entry of ours is."""
    return reply if isinstance(reply, bytes) else b""


def _replaced(old: bytes) -> BlobManifest | None:
    """Return the manifest that was just replaced; None if there was none that can be read."""
    try:
        return parse_manifest(old)
    except Corrupt:
        return None


def _batches(lengths: Mapping[bytes, int]) -> Iterable[list[bytes]]:
    """Yield keys in order, in batches of at most ``BATCH_BYTES`` and ``BATCH_KEYS``, or of one."""
    batch: list[bytes] = []
    total = 0
    for key, length in lengths.items():
        if batch and (total + length > BATCH_BYTES or len(batch) >= BATCH_KEYS):
            yield batch
            batch, total = [], 0
        batch.append(key)
        total += length
    if batch:
        yield batch
