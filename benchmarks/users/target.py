"""A server that is measured."""

from __future__ import annotations

from typing import NamedTuple

from launch.remote.address import Address


class Target(NamedTuple):
    """A server that is measured."""

    address: Address
    model: str = ""  # "" = the first that it lists
    timeout_s: float = 600.0  # of one request
