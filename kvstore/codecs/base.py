"""The seam between the store and a codec."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

from kvstore.shapes import KVLayout, KVRun

Payload: TypeAlias = bytes | memoryview


@runtime_checkable
class Codec(Protocol):
    """Turns a run of tokens of all layers into one payload and back.

    A codec is stateless and thread-safe: the store calls it from several threads at once.
    Encoding the same run twice gives the same bytes: on every machine and every backend for a row
    codec, on one machine where the transform is a matrix product. Any machine reads what any wrote.
    """

    @property
    def id(self) -> str:
        """Name and arithmetic version, such as ``tq3.2``: part of every key and header.

        A calibrated codec adds digits of its profile: ``max.1-0123456789``.
        """

    @property
    def exact(self) -> bool:
        """True only if ``decode(encode(x))`` is ``x``, bit for bit."""

    def check(self, layout: KVLayout) -> None:
        """Raise ``UnknownCodec`` with one clear sentence if this layout cannot be encoded."""

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        """Length of the payload; longer only by the rows that have to be kept as they are.

        An estimate where codes are entropy-coded.
        """

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> Payload:
        """``run`` holds tokens ``first_token ..`` of the session; views are read, never kept.

        The payload is the caller's alone.
        """

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        """Fill ``out`` (views into the caller's arrays, all tokens of the run).

        Raises:
            Corrupt: the payload does not have the length or structure that ``out`` asks for.
                ``out`` may then hold anything and must not be used.
        """
