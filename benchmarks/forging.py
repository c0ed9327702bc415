"""Changes packed bytes at random, as damage does, or with valid checksums, as an attacker would.

``mutated`` changes any bytes. The others change what a header claims (layers, heads, dimensions,
tokens, shapes, names) and make lengths, digests and checksums valid again, so that a reader can
reject only the claim itself. All draw from a seeded generator.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

from kvstore.blobs import format as blobs
from kvstore.shapes import KVLayout
from thermocline.packed import MAGIC

# Changes a valid input; arguments: a generator of random numbers, the input, another input.
Change: TypeAlias = Callable[[random.Random, bytes, bytes], bytes]

EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 64) - 1)
SIZES = (0, 1, 2, 7, 16, 100, 576, 1000, 1024, 3000, 1 << 16, 1 << 20, 1 << 31, 1 << 40, -1)
MOST_FIELD = (1 << 32) - 1  # of a number in a blob's header


def mutated(chance: random.Random, seed: bytes, other: bytes) -> bytes:
    """Change a valid input in one to four ways."""
    data = bytearray(seed)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 2 if data:
                data[at % len(data)] = chance.randrange(256)
            case 3:
                del data[at:]
            case 4:
                del data[at : at + chance.randint(1, 16)]
            case 5:
                data[at:at] = chance.randbytes(chance.randint(1, 16))
            case 6:
                size = chance.choice((1, 2, 4, 8))
                number = chance.choice(EXTREMES) & ((1 << 8 * size) - 1)
                data[at : at + size] = number.to_bytes(size, chance.choice(("little", "big")))
            case 7 if other:
                start = chance.randrange(len(other))
                data[at : at + 32] = other[start : start + 32]
    return bytes(data)


def mended(chance: random.Random, seed: bytes, other: bytes) -> bytes:
    """Change a blob anywhere, and make its checksum valid again."""
    return with_right_checksum(mutated(chance, seed, other))


def with_right_checksum(data: bytes) -> bytes:
    """Make the checksum and the stated length valid, so that a reader continues after them."""
    head, tail = bytearray(data[: blobs.HEADER_BYTES]), data[blobs.HEADER_BYTES :]
    if len(head) < blobs.HEADER_BYTES:
        return data
    head[120:128] = len(tail).to_bytes(8, "little")
    crc = blobs._checksum(bytes(head[:128]), tail)
    return bytes(head[:128]) + crc.to_bytes(4, "little") + tail


def forged_blob(chance: random.Random, seed: bytes, other: bytes) -> bytes:
    """Change a blob's payload, or its header's description of the payload."""
    (header, payload), (another, _) = blobs.parse(seed), blobs.parse(other)
    body = bytes(payload)
    for _ in range(chance.randint(1, 2)):
        match chance.randrange(6):
            case 0:
                header = header._replace(num_tokens=_field(chance, header.num_tokens))
            case 1:
                header = header._replace(first_token=_field(chance, header.first_token))
            case 2:
                header = header._replace(codec=another.codec, layout=another.layout)
            case 3:
                header = header._replace(key=another.key)
            case _:
                body = mutated(chance, body, other)
    return bytes(blobs.pack(header, body))


def within_blob(change: Change) -> Change:
    """Return a change of blobs that applies ``change`` to their payload."""

    def changed(chance: random.Random, seed: bytes, other: bytes) -> bytes:
        (header, payload), (_, another) = blobs.parse(seed), blobs.parse(other)
        return bytes(blobs.pack(header, change(chance, bytes(payload), bytes(another))))

    return changed


def forged_rows(chance: random.Random, seed: bytes, other: bytes) -> bytes:
    """Change the claims of ``Packed.tobytes``, or its payload, and seal them again."""
    length = int.from_bytes(seed[4:8], "little")
    header, payload = blobs.parse(seed[8 + length :])
    claims: Any = msgspec.json.decode(seed[8 : 8 + length])
    body = bytes(payload)
    for _ in range(chance.randint(1, 3)):
        match chance.randrange(6):
            case 0 | 1:
                renumber(chance, claims)
            case 2:
                _relayer(chance, claims["layers"])
            case 3:
                header = header._replace(num_tokens=_field(chance, header.num_tokens))
            case 4:
                header = header._replace(first_token=_field(chance, header.first_token))
            case 5:
                body = mutated(chance, body, other)
    head = msgspec.json.encode(claims)
    try:
        layout = msgspec.json.decode(head, type=KVLayout)
        header = header._replace(layout=blobs.layout_digest(layout))
    except msgspec.ValidationError:
        pass  # a reader refuses it before it checks the digest
    return b"".join((MAGIC, len(head).to_bytes(4, "little"), head, blobs.pack(header, body)))


def forged_state(chance: random.Random, seed: bytes, other: bytes) -> bytes:
    """Change numbers in the structure of ``encode_state``'s bytes, or its arrays."""
    (length,) = struct.unpack_from("<I", seed)
    structure: Any = msgspec.msgpack.decode(seed[8 : 8 + length])
    arrays = seed[8 + length + -(8 + length) % 64 :]
    for _ in range(chance.randint(1, 3)):
        if chance.randrange(3):
            renumber(chance, structure)
        else:
            arrays = mutated(chance, arrays, other)
    head = msgspec.msgpack.encode(structure)
    head = struct.pack("<II", len(head), 0) + head
    return head + bytes(-len(head) % 64) + arrays


def forged_record(chance: random.Random, seed: bytes, other: bytes) -> bytes:
    """Change numbers, names and lists of names in the payload of a session's record."""
    claims: Any = msgspec.msgpack.decode(seed)
    for _ in range(chance.randint(1, 3)):
        if chance.randrange(2):
            renumber(chance, claims)
            continue
        node, key = chance.choice(list(_leaves(claims, bytes | list)))
        value = node[key]
        if isinstance(value, bytes):
            node[key] = mutated(chance, value, other)
        elif not value or not chance.randrange(4):
            node[key] = value[:-1]
        else:
            node[key] = value + [chance.choice(value)] * chance.choice((1, 30, 3000))
    return msgspec.msgpack.encode(claims)


def renumber(chance: random.Random, tree: Any) -> None:
    """Replace one number somewhere in a tree of lists and dicts."""
    places = [(node, key) for node, key in _leaves(tree, int) if type(node[key]) is int]
    if places:
        node, key = chance.choice(places)
        node[key] = _size(chance, node[key])


def _leaves(tree: Any, kinds: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the places of all values of these types: the list or dict, and the index or key."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, kinds):
            yield tree, key
        if isinstance(value, dict | list):
            yield from _leaves(value, kinds)


def _size(chance: random.Random, number: int) -> int:
    near = (number + 1, number - 1, 2 * number, number // 2, chance.randrange(1 << 12))
    return chance.choice((*SIZES, *near))


def _field(chance: random.Random, number: int) -> int:
    return _size(chance, number) & MOST_FIELD


def _relayer(chance: random.Random, layers: list[Any]) -> None:
    if not layers or not chance.randrange(8):
        layers.clear()
    elif chance.randrange(2):
        layers += [dict(chance.choice(layers)) for _ in range(chance.choice((1, 3, 30)))]
    else:
        del layers[chance.randrange(len(layers))]
