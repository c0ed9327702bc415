"""The list of the replicas that an orchestrator starts and ends, as it is sent to gateways."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MAX_REPLICAS: Final = 1000
MAX_LISTING_BYTES: Final = 1 << 20


class ListedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        name: differs from all others', earlier ones included.
        url: the address of its HTTP server.
        control: the address of its control connection.
        leaving: it takes no new sessions, for it is about to end.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    url: Annotated[str, msgspec.Meta(max_length=500, pattern="^https?://")]
    control: Annotated[str, msgspec.Meta(max_length=500, pattern="^(tcp|unix):")]
    leaving: bool = False


class Listing(msgspec.Struct, frozen=True):
    """All replicas of one model."""

    replicas: Annotated[list[ListedReplica], msgspec.Meta(max_length=MAX_REPLICAS)]


def read_listing(body: bytes) -> list[ListedReplica]:
    """Decode a list. Raises ``ValueError``: it is none, or two replicas have one name."""
    replicas = msgspec.json.decode(body, type=Listing).replicas
    if len({x.name for x in replicas}) < len(replicas):
        raise ValueError("two replicas have one name")
    return replicas
