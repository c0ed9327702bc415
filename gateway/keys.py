"""API keys, the tenants that they belong to, and the tenants' salts.

A key is 32 random bytes, so storing one plain SHA-256 of it is enough. What a caller sends is
compared with every known key in constant time. A tenant's salt is derived from the server's secret:
it enters every chunk key of that tenant, is never told to anybody, and no client can choose it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from engines.openai.requests import InvalidRequest

KEY_PREFIX = "tc-"
ANONYMOUS = "local"
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-f]{64})")


class BadKeyLine(Exception):
    """A line of the key list cannot be read. The message never quotes the line."""


class Tenant(NamedTuple):
    """A caller's name, and the salt that enters every key of its cold data."""

    name: str
    salt: bytes


class Tenants:
    """All tenants that may call. Without any key there is one, ``ANONYMOUS``."""

    def __init__(self, secret: bytes, key_lines: Iterable[str] = ()) -> None:
        """``secret``: at least 16 random bytes that stay the same over restarts.

        Raises:
            BadKeyLine: with the number of the line.
        """
        if len(secret) < 16:
            raise ValueError("the server's secret needs at least 16 bytes")
        self._secret = secret
        self._keys = _parse(key_lines)

    def replace(self, key_lines: Iterable[str]) -> None:
        """Take other keys from now on, all at once; turns that run go on.

        Raises:
            BadKeyLine: one cannot be read, or the last key would go, so that none were needed any
                more, or the first would come. The keys are as before.
        """
        keys = _parse(key_lines)
        if bool(keys) != bool(self._keys):
            raise BadKeyLine(
                "whether API keys are needed cannot change while the server runs: start it again"
            )
        self._keys = keys

    @property
    def open_to_all(self) -> bool:
        """True if no key is needed."""
        return not self._keys

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def authenticate(self, authorization: str | None) -> Tenant:
        """Find the tenant whose key an ``Authorization`` header holds.

        Raises:
            InvalidRequest: 401, no key or an unknown one.
        """
        if self.open_to_all:
            return self._tenant(ANONYMOUS)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorised("No API key was sent. Send it as: Authorization: Bearer KEY.")
        shown = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: str | None = None
        for digest, name in self._keys:  # always all of them, so that the time tells nothing
            if hmac.compare_digest(digest, shown):
                found = name
        if found is None:
            raise _unauthorised("The API key is not valid here.")
        return self._tenant(found)

    def salt_of(self, name: str) -> bytes:
        """Derive a tenant's salt, 32 bytes, from the server's secret."""
        return hmac.digest(self._secret, b"salt" + name.encode(), "sha256")

    def _tenant(self, name: str) -> Tenant:
        return Tenant(name, self.salt_of(name))


def generate_key(tenant: str) -> tuple[str, str]:
    """Make a new key, to be shown once, and its line for the key list.

    Raises:
        BadKeyLine: ``tenant`` cannot be a tenant's name.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    line = f"{tenant}:{hashlib.sha256(key.encode()).hexdigest()}"
    _parse([line])
    return key, line


def read_key_lines(path: str) -> list[str]:
    """Read a key list. Raises ``OSError`` or ``UnicodeDecodeError``."""
    return Path(path).read_text(encoding="utf-8").splitlines()


def _parse(lines: Iterable[str]) -> list[tuple[bytes, str]]:
    keys = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise BadKeyLine(
                f"line {number} of the API keys is not 'tenant:sha256': a tenant's name has"
                " letters, digits, '.', '_' and '-', the hash is 64 lower-case hex digits;"
                " a new line is made by: thermocline keys new TENANT"
            )
        keys.append((bytes.fromhex(found[2]), found[1]))
    return keys


def _unauthorised(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_api_key", status=401)
