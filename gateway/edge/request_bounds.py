"""Counts the bytes of one request while they come in. Pure arithmetic: no sockets, no clock.

A request is a head, a body, and for chunked bodies framing and trailers around it. The parser under
the protocol bounds none of them, and keeps each name and value until it is whole, so what belongs
to no body is counted from the last byte of body on.
"""

from __future__ import annotations

from gateway.config import GatewayConfig

MAX_HEADER_BYTES = 32 << 10
MAX_FIELDS = 200  # header lines, and as many trailer lines
# Bytes on the wire for each byte of body: a chunk of one byte takes six.
WIRE_PER_BODY = 8


class RequestBounds:
    """The counts of the request that a connection is receiving; ``restart`` begins the next."""

    def __init__(self, limits: GatewayConfig) -> None:
        self._max_wire_bytes = WIRE_PER_BODY * limits.max_body_bytes + MAX_HEADER_BYTES
        self.restart()

    def restart(self) -> None:
        """Forget the last request: what comes next is a head."""
        self.in_head = True
        self._num_fields = 0
        self._beside_body_bytes = 0  # since the last byte of body
        self._wire_bytes = 0

    def received(self, nbytes: int) -> None:
        """Count bytes of which the parser has not said yet what they are."""
        self._beside_body_bytes += nbytes
        self._wire_bytes += nbytes

    def field(self) -> bool:
        """Count a header or trailer line; False if it is one too many."""
        self._num_fields += 1
        return self._num_fields <= MAX_FIELDS

    def head_ended(self, nbytes: int) -> bool:
        """Note that the head is whole; False if its ``nbytes`` are too many."""
        self.in_head = False
        self._num_fields = 0
        self._beside_body_bytes = self._wire_bytes = 0
        return nbytes <= MAX_HEADER_BYTES

    def body(self) -> None:
        """Note that bytes of the body have come."""
        self._beside_body_bytes = 0

    @property
    def exceeded(self) -> bool:
        """True if the head, or what is beside or around the body, has become too large."""
        return self._beside_body_bytes > MAX_HEADER_BYTES or self._wire_bytes > self._max_wire_bytes
