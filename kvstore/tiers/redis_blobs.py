"""Whole blobs on a Redis server: written head last, read completely or not at all.

Each method is one exchange with the server, or a few; every one may raise ``TierUnavailable``. A
command that the server refuses (out of memory and not allowed to evict, a read-only replica, an
access rule) concerns its own blob only and is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import Corrupt, TierUnavailable
from kvstore.tiers.redis_link import Command, RedisLink, Reply
from kvstore.tiers.redis_pieces import (
    HEAD_BYTES,
    Head,
    all_names,
    checked,
    head_name,
    key_in,
    new_head,
    parse_head,
    piece_names,
    pieces,
    scan_pattern,
)

GROUP_BYTES = 4 << 20  # of blobs that travel together
GROUP_KEYS = 256
UNFINISHED_S = 600  # pieces whose head never came expire by themselves
SCAN_COUNT = 1000
MAX_SCANS = 2000  # a bound on the work, two million entries

# Removes a damaged blob, unless a writer has put a new head in its place.
_REMOVE_IF_SAME = (
    "if redis.call('getrange', KEYS[1], 0, #ARGV[1] - 1) == ARGV[1] then "
    "return redis.call('unlink', unpack(KEYS)) end return 0"
)


@dataclass
class _Reading:
    """What one ``read`` has so far."""

    until: float
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    removals: list[Command] = field(default_factory=list)

    def remove(self, names: Sequence[bytes], head: bytes) -> None:
        """A damaged blob must go: while its head is there, nobody would store it again."""
        self.removals.append(("EVAL", _REMOVE_IF_SAME, len(names), *names, head))


class RedisBlobs:
    """Thread-safe; keeps nothing in memory.

    Args:
        ttl_ms: entries expire this long after they were written or touched; 0 = never.
    """

    def __init__(self, link: RedisLink, ttl_ms: int) -> None:
        self._link = link
        self._ttl_ms = ttl_ms

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        replies = self._link.run([("EXISTS", head_name(key)) for key in keys])
        return [reply == 1 for reply in replies]

    def heads(self, keys: Sequence[bytes]) -> dict[bytes, Head]:
        """Of those that have a readable one."""
        commands = [("GETRANGE", head_name(key), 0, HEAD_BYTES - 1) for key in keys]
        found: dict[bytes, Head] = {}
        for key, raw in zip(keys, self._link.run(commands), strict=True):
            try:
                found[key] = parse_head(_value(raw))
            except Corrupt:
                continue
        return found

    # Reading

    def read(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The whole ones among ``keys``, as far as they came within one deadline.

        Raises:
            TierUnavailable: not a single one did, and the server is why.
        """
        reading = _Reading(self._link.deadline())
        try:
            for first in range(0, len(keys), GROUP_KEYS):
                heads = self._read_heads(keys[first : first + GROUP_KEYS], reading)
                for group in _groups({key: head.length for key, head in heads.items()}):
                    self._read_pieces({key: heads[key] for key in group}, reading)
            if reading.removals:
                self._link.run(reading.removals)
        except TierUnavailable:
            if not reading.blobs:
                raise
        return reading.blobs

    def _read_heads(self, keys: Sequence[bytes], reading: _Reading) -> dict[bytes, Head]:
        """The heads of blobs in pieces; small blobs come along with theirs."""
        heads: dict[bytes, Head] = {}
        replies = self._link.run([("GET", head_name(key)) for key in keys], reading.until)
        for key, raw in zip(keys, map(_value, replies), strict=True):
            if not raw:
                continue
            try:
                head = parse_head(raw)
                if head.num_pieces:
                    heads[key] = head
                else:
                    reading.blobs[key] = checked(raw[HEAD_BYTES:], head)
            except Corrupt as error:
                self._link.count(str(error))
                reading.remove([head_name(key)], raw[:HEAD_BYTES])
        return heads

    def _read_pieces(self, heads: Mapping[bytes, Head], reading: _Reading) -> None:
        names = [name for key, head in heads.items() for name in piece_names(key, head)]
        replies = iter(self._link.run([("GET", name) for name in names], reading.until))
        for key, head in heads.items():
            parts = [_value(next(replies)) for _ in range(head.num_pieces)]
            try:
                reading.blobs[key] = checked(b"".join(parts), head)
            except Corrupt as error:
                if all(parts):  # else the server evicted some, which is no error
                    self._link.count(str(error))
                reading.remove(all_names(key, head), head.pack())

    # Writing

    def write(self, blobs: Mapping[bytes, bytes]) -> Iterator[dict[bytes, Head]]:
        """Write groups of blobs, in order, over whatever is there; each group's written ones."""
        for group in _groups({key: len(blob) for key, blob in blobs.items()}):
            heads = {key: new_head(blobs[key]) for key in group}
            refused = self._write_pieces(heads, blobs)
            refused |= self._write_heads([x for x in group if x not in refused], heads, blobs)
            if refused:
                self.remove({key: heads[key] for key in refused}, with_heads=False)
            yield {key: head for key, head in heads.items() if key not in refused}

    def _write_pieces(
        self, heads: Mapping[bytes, Head], blobs: Mapping[bytes, bytes]
    ) -> set[bytes]:
        """The keys of which the server refused a piece."""
        expiry = self._ttl_ms or UNFINISHED_S * 1000
        owners: list[bytes] = []
        commands: list[Command] = []
        for key, head in heads.items():
            for name, piece in pieces(key, head, blobs[key]):
                owners.append(key)
                commands.append(("SET", name, piece, "PX", expiry))
        replies = self._link.run(commands) if commands else []
        return {x for x, reply in zip(owners, replies, strict=True) if self._is_refusal(reply)}

    def _write_heads(
        self, keys: Sequence[bytes], heads: Mapping[bytes, Head], blobs: Mapping[bytes, bytes]
    ) -> set[bytes]:
        """Make blobs visible whose pieces are there, and remove what they replace."""
        commands: list[Command] = []
        for key in keys:
            inline = b"" if heads[key].num_pieces else blobs[key]
            commands.append(("GETSET", head_name(key), heads[key].pack() + inline))
        commands += [x for key in keys for x in self._expiry_commands(key, heads[key])]
        replies = self._link.run(commands)[: len(keys)] if commands else []
        refused: set[bytes] = set()
        replaced: list[Command] = []
        for key, old in zip(keys, replies, strict=True):
            if self._is_refusal(old):
                refused.add(key)
            elif names := _names_left_behind(key, _value(old)):
                replaced.append(("UNLINK", *names))
        if replaced:
            self._link.run(replaced)
        return refused

    def _expiry_commands(self, key: bytes, head: Head) -> Iterator[Command]:
        if self._ttl_ms:
            yield "PEXPIRE", head_name(key), self._ttl_ms
        else:
            yield from (("PERSIST", name) for name in piece_names(key, head))

    def _is_refusal(self, reply: Reply) -> bool:
        if isinstance(reply, Exception):
            self._link.count(str(reply))
            return True
        return False

    def remove(self, heads: Mapping[bytes, Head], *, with_heads: bool = True) -> None:
        names = all_names if with_heads else piece_names
        listed = [names(key, head) for key, head in heads.items()]
        commands: list[Command] = [("UNLINK", *x) for x in listed if x]
        if commands:
            self._link.run(commands)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove whatever is there, damaged heads too; how many keys were."""
        heads = self.heads(keys)
        self.remove(heads)
        others: list[Command] = [("UNLINK", head_name(x)) for x in keys if x not in heads]
        replies = self._link.run(others) if others else []
        return len(heads) + len([x for x in replies if x == 1])

    # Keeping and finding

    def touch(self, heads: Mapping[bytes, Head]) -> None:
        """Make the server's clocks for expiry and eviction start anew; the last one is latest."""
        commands: list[Command] = []
        for key, head in heads.items():
            names = all_names(key, head)
            if self._ttl_ms:
                commands += [("PEXPIRE", name, self._ttl_ms) for name in names]
            else:
                commands.append(("TOUCH", *names))
        if commands:
            self._link.run(commands)

    def find(self, prefix: bytes) -> list[bytes]:
        """Keys with ``prefix``, sorted; walks the server's whole key space."""
        found: set[bytes] = set()
        cursor = b"0"
        for _ in range(MAX_SCANS):
            command = ("SCAN", cursor, "MATCH", scan_pattern(prefix), "COUNT", SCAN_COUNT)
            (reply,) = self._link.run([command])
            if self._is_refusal(reply):
                raise TierUnavailable(f"redis tier: {reply}")
            cursor, names = reply
            found.update(key for key in map(key_in, names) if key is not None)
            if cursor == b"0":
                break
        return sorted(found)


def _value(reply: Reply) -> bytes:
    """A missing or refused entry reads as empty, which no entry of ours is."""
    return reply if isinstance(reply, bytes) else b""


def _names_left_behind(key: bytes, old: bytes) -> list[bytes]:
    """Pieces of the blob whose head was just replaced."""
    try:
        before = parse_head(old)
    except Corrupt:
        return []
    return piece_names(key, before)


def _groups(lengths: Mapping[bytes, int]) -> Iterable[list[bytes]]:
    """Keys in order, in groups of at most ``GROUP_BYTES`` or of one."""
    group: list[bytes] = []
    total = 0
    for key, length in lengths.items():
        if group and (total + length > GROUP_BYTES or len(group) >= GROUP_KEYS):
            yield group
            group, total = [], 0
        group.append(key)
        total += length
    if group:
        yield group
