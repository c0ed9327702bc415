"""The tokens between a gateway and replicas that an orchestrator starts, made of a shared secret.

One file (``store.secret_file``) on each machine is then all that has to be handed out, and no token
is in a command line, in a configuration or in the database of the orchestrator.
"""

from __future__ import annotations

import hmac


def engine_token(secret: bytes) -> str:
    """Return the bearer token of both addresses of a replica."""
    return _token(secret, "replica")


def list_token(secret: bytes) -> str:
    """Return the bearer token of the list of replicas."""
    return _token(secret, "list of replicas")


def ray_token(secret: bytes) -> str:
    """Return the token of a Ray that ``engines.on_ray`` starts."""
    return _token(secret, "ray")


def _token(secret: bytes, purpose: str) -> str:
    return hmac.digest(secret, f"thermocline token: {purpose}".encode(), "sha256").hex()
