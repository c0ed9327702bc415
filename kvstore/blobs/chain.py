"""The names of blobs: one chained digest for each full chunk of a session's tokens.

A session's *chain* is a list of names, 32 bytes each, one for each full chunk. A name covers its
chunk's tokens and, through the name before it, all tokens before them, the tenant's salt and the
model's fingerprint. So equal names mean equal tokens from the first one on, and one tenant can
never name another tenant's chunk. The store compares and looks up names and never sees tokens. An
engine makes the chain (``ChainMaker``) from token ids, or from the hashes of its own blocks.

    root      = H(version, salt, fingerprint, chunk_tokens)
    chain[0]  = H(root,     tokens of chunk 0)
    chain[i]  = H(chain[i-1], tokens of chunk i)

A key in a tier is a byte for the kind of blob and a digest:

    chunk    the chunk's name
    state    the name of the chunk at whose end the state was taken
    window   the chunk's name; or, if the window begins inside the chunk, a digest of the name and
             the number of tokens before the window
    record   H(tenant, session id, model), without salt and fingerprint, so that the record is still
             found after a change of weights and the miss gets that reason
    page     the name of the last chunk that a page of a session's chain lists
    profile  H(fingerprint, codec id); the value is no blob, but the arrays that a codec learned

The key does not depend on how KV is packed: the header of a blob names its codec.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION: Final = 3
NAME_BYTES: Final = 32
KEY_BYTES: Final = 1 + NAME_BYTES

CHUNK: Final = b"c"
WINDOW: Final = b"w"
STATE: Final = b"s"
RECORD: Final = b"r"
PAGE: Final = b"p"
PROFILE: Final = b"f"
KINDS: Final = frozenset((CHUNK, WINDOW, STATE, RECORD, PAGE))

Tokens: TypeAlias = NDArray[np.int32]
# The names of a session's full chunks, from the first one on.
Chain: TypeAlias = Sequence[bytes]

# blake2b's personalisation keeps the uses of the hash apart.
_ROOT = b"thermocline root"
_LINK = b"thermocline link"
_BLOCKS = b"thermoclineblock"
_WINDOW = b"thermocline wind"
_RECORD = b"thermocline sess"
_PROFILE = b"thermocline prof"


class Piece(NamedTuple):
    """The key and the tokens of a blob: a chunk, window rows, a state, or a page of the chain.

    The blob has the rows of ``num_tokens`` tokens from ``first_token`` on. A state and a page have
    ``num_tokens`` 0: the state was taken after ``first_token`` tokens, and the last chunk that the
    page lists ends there.
    """

    key: bytes
    first_token: int
    num_tokens: int

    @property
    def end_token(self) -> int:
        """The index after its last token."""
        return self.first_token + self.num_tokens

    @property
    def is_chunk(self) -> bool:
        return self.key[:1] == CHUNK

    @property
    def is_window(self) -> bool:
        return self.key[:1] == WINDOW

    @property
    def is_state(self) -> bool:
        return self.key[:1] == STATE


class ChainMaker:
    """Names the full chunks of the sessions of one model.

    Args:
        fingerprint: the model's, which covers weights, dtype, rank and layout.
        chunk_tokens: tokens of a chunk.
    """

    def __init__(self, fingerprint: str, chunk_tokens: int) -> None:
        self._fingerprint = fingerprint.encode()
        self.chunk_tokens = chunk_tokens

    def of_tokens(self, salt: bytes, tokens: Tokens, before: Chain = ()) -> list[bytes]:
        """Return the names of all full chunks of ``tokens``, (num_tokens,) int32.

        Args:
            salt: the tenant's; the names do not reveal it.
            before: the names of the first chunks, if known; their tokens are not hashed again.
        """
        chain, step = list(before), 4 * self.chunk_tokens
        name = chain[-1] if chain else self._root(salt)
        raw = as_tokens(tokens[len(chain) * self.chunk_tokens :]).tobytes()
        for first in range(0, len(raw) - step + 1, step):
            name = _digest(_LINK, name + raw[first : first + step])
            chain.append(name)
        return chain

    def of_blocks(self, hashes: Sequence[bytes], block_tokens: int) -> list[bytes]:
        """Return the names of all full chunks of an engine's own blocks.

        A name is made of the hash of the chunk's last block. The engine's hash covers the block's
        tokens, the hash before it, the tenant's salt, and all else that the KV depends on
        (adapters, images). It does not cover weights, dtype and ranks; the fingerprint does.

        Args:
            hashes: the engine's hash of each block, from the first one on.
            block_tokens: tokens of a block; a chunk has a whole number of blocks.
        """
        size = self.chunk_tokens // block_tokens
        sizes = struct.pack("<IIQ", FORMAT_VERSION, self.chunk_tokens, len(self._fingerprint))
        prefix = sizes + self._fingerprint
        return [_digest(_BLOCKS, prefix + bytes(x)) for x in hashes[size - 1 :: size]]

    def _root(self, salt: bytes) -> bytes:
        version, size = struct.pack("<I", FORMAT_VERSION), struct.pack("<I", self.chunk_tokens)
        return hashed(_ROOT, version, salt, self._fingerprint, size)


def chunk_before(keys: Sequence[bytes], key: bytes) -> bytes:
    """Return the key of the last chunk before ``key`` in a list of keys; b"" if there is none."""
    before = keys[: keys.index(key)] if key in keys else ()
    return next((x for x in reversed(before) if x[:1] == CHUNK), b"")


def stretches(chain: Sequence[bytes], keys: Container[bytes]) -> Iterator[list[bytes]]:
    """Yield the keys of a chain that are in ``keys``, as lists without a chunk missing between."""
    found: list[bytes] = []
    for key in chain:
        if key in keys:
            found.append(key)
        elif key[:1] == CHUNK and found:
            yield found
            found = []
    if found:
        yield found


class ChainKeys:
    """Makes the keys of a chain's blobs: chunks, windows and states.

    Args:
        chunk_tokens: tokens of a chunk.
        growing: whether the model has layers that keep all tokens; otherwise there are no chunks.
        window_tokens: tokens that layers with windows keep; 0 = no window rows are stored.
    """

    def __init__(self, chunk_tokens: int, *, growing: bool = True, window_tokens: int = 0) -> None:
        self.chunk_tokens = chunk_tokens
        self.growing = growing
        self.window_tokens = window_tokens

    def chunks(self, chain: Chain, first: int = 0, end: int | None = None) -> list[Piece]:
        """Return the chunks from number ``first`` to before ``end``; None = to the last."""
        if not self.growing:
            return []
        size = self.chunk_tokens
        return [Piece(CHUNK + x, i * size, size) for i, x in enumerate(chain[first:end], first)]

    def state(self, chain: Chain, num_chunks: int) -> Piece:
        """Return the state after the first ``num_chunks`` chunks."""
        return Piece(STATE + chain[num_chunks - 1], num_chunks * self.chunk_tokens, 0)

    def windows(self, chain: Chain, num_chunks: int) -> list[Piece]:
        """Return the window rows of the state after ``num_chunks`` chunks, in order.

        The first piece has only the last tokens of its chunk if the window begins inside it.
        """
        if not self.window_tokens:
            return []
        size = self.chunk_tokens
        start = max(num_chunks * size - self.window_tokens, 0)
        first, skipped = divmod(start, size)
        pieces = [Piece(WINDOW + chain[i], i * size, size) for i in range(first, num_chunks)]
        if skipped:
            pieces[0] = Piece(WINDOW + part_name(chain[first], skipped), start, size - skipped)
        return pieces


def part_name(name: bytes, skipped: int) -> bytes:
    """Return the name of the window rows of a chunk without its first ``skipped`` tokens."""
    return _digest(_WINDOW, name + struct.pack("<I", skipped))


def record_key(tenant: str, session_id: str, model: str) -> bytes:
    """Return the key of a session's record; ids may have any length and any characters."""
    return RECORD + hashed(_RECORD, *name_bytes(tenant, session_id, model))


def profile_key(fingerprint: str, codec_id: str) -> bytes:
    """Return the key of a codec's profile."""
    return PROFILE + hashed(_PROFILE, fingerprint.encode(), codec_id.encode())


def num_common(one: Chain, other: Chain) -> int:
    """Count the names that two chains begin with alike.

    A name covers everything before it: if two names are equal, so are all names before them. Hence
    a binary search.
    """
    shorter = range(min(len(one), len(other)))
    return bisect_left(shorter, True, key=lambda i: one[i] != other[i])


def num_common_joined(one: bytes, other: bytes) -> int:
    """Count the names that two ``joined`` chains begin with alike."""

    def differ(number: int) -> bool:
        place = slice(number * NAME_BYTES, (number + 1) * NAME_BYTES)
        return one[place] != other[place]

    return bisect_left(range(min(len(one), len(other)) // NAME_BYTES), True, key=differ)


def joined(chain: Chain) -> bytes:
    """Return the names of a chain as one string of bytes, ``NAME_BYTES`` for each chunk."""
    return b"".join(chain)


def split(names: bytes) -> list[bytes]:
    """Return the names in a string of bytes that ``joined`` made."""
    return [names[i : i + NAME_BYTES] for i in range(0, len(names), NAME_BYTES)]


def as_tokens(token_ids: Sequence[int] | Tokens) -> Tokens:
    """Return token ids as (num_tokens,) little-endian int32, the bytes of which are hashed."""
    return np.ascontiguousarray(token_ids, dtype="<i4")


def name_bytes(*names: str) -> list[bytes]:
    """Encode names of tenants, sessions or models, which may have any characters, as UTF-8."""
    return [x.encode("utf-8", "surrogatepass") for x in names]


def hashed(person: bytes, *parts: bytes) -> bytes:
    """Return the digest of byte strings and their lengths, so that other parts never hash alike.

    Args:
        person: blake2b's personalisation.
    """
    state = blake2b(digest_size=NAME_BYTES, person=person)
    for part in parts:
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.digest()


def _digest(person: bytes, content: bytes) -> bytes:
    return blake2b(content, digest_size=NAME_BYTES, person=person).digest()
