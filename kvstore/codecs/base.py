"""The seam between the store and a codec."""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias, runtime_checkable

from kvstore.shapes import KVLayout, KVRun

Payload: TypeAlias = bytes | memoryview

# The first tokens of a session, which every codec keeps as they are (16 bits per value): attention
# leans on them far more than on any other.
NUM_SINKS: Final = 4


@runtime_checkable
class Codec(Protocol):
    """RopeTables a run of tokens of all layers into one payload and back.

    A codec is stateless and thread-safe: the store calls it from several threads at once.
    Encoding the same run twice gives the same bytes: on every machine and every backend for a row
    codec, on one machine where the transform is a matrix product. Any machine reads what any wrote.
    """

    @property
    def id(self) -> str:
        """The codec's name and arithmetic version, such as ``tq3.2``: part of every key and header.

        A calibrated codec adds digits of its profile: ``max.1-0123456789``.
        """

    @property
    def exact(self) -> bool:
        """True only if ``decode(encode(x))`` is ``x``, bit for bit."""

    def check(self, layout: KVLayout) -> None:
        """Checks that this layout can be encoded.

        Raises:
            UnknownCodec: it cannot; one clear sentence says why.
        """

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        """Returns the length of the payload in bytes, an estimate where codes are entropy-coded.

        A payload is longer only by the rows that have to be kept as they are.
        """

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        """Returns the length in bytes below which no payload of so many tokens is."""

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> Payload:
        """Packs ``run``, whose tokens are ``first_token ..`` of the session.

        Its arrays are read and never kept: K (num_kv_heads, num_tokens, head_dim) and V
        (num_kv_heads, num_tokens, value_dim) of each layer, in the numpy dtype of ``layout``. The
        payload is the caller's alone.
        """

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        """Unpacks all tokens of a run into ``out``.

        ``out`` holds views into the caller's arrays, as ``encode`` takes them.

        Raises:
            Corrupt: the payload does not have the length or structure that ``out`` asks for.
                ``out`` may then hold anything and must not be used.
        """
