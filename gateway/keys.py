"""API keys, the tenants that they belong to, and the tenants' salts.

A key is 32 random bytes, so storing one plain SHA-256 of it is enough. What a caller sends is
compared with every known key in constant time. A tenant's salt is derived from the server's secret:
it enters every chunk key of that tenant, is never revealed, and no client can choose it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from engines.base import SessionRef, TierName
from engines.openai.requests import InvalidRequest

KEY_PREFIX = "tc-"
ANONYMOUS = "local"
MAX_WEIGHT = 1_000_000
_USER_MARK = "/"  # no tenant's name has it
_HASH_MARK = "~"  # no word begins with it
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
WEIGHT = "weight"  # a word of a key's line, beside its limits
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-f]{64})((?:\s+[a-z_]+=[0-9]{1,15})*)")
_NUMBERS = re.compile(r"(?:[a-z_]+=[0-9]{1,15}\s*)*")


class BadKeyLine(Exception):
    """A line of the key list cannot be read. The message never quotes the line."""


class Limits(NamedTuple):
    """The limits of one key; 0 = any number. ``sessions`` and bytes of tiers are its tenant's."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0
    sessions: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0

    def bytes_of(self, tier: TierName) -> int:
        """Return the limit of a tier's bytes; 0 for Redis, whose server alone bounds it."""
        return {"ram": self.ram_bytes, "disk": self.disk_bytes}.get(tier, 0)


class Tenant(NamedTuple):
    """A caller's name, and the salt that enters every key of its cold data; its key's limits.

    A user of a key's is a tenant of its own, ``TENANT/USER``.
    """

    name: str
    salt: bytes
    key_id: str = ""  # distinguishes keys of one tenant; no secret
    limits: Limits | None = None  # None: the usual ones
    admin: bool = False  # may see and manage all tenants' sessions
    weight: int = 1  # of its share of the engine; the largest that one of its keys has

    def session(self, id: str) -> SessionRef:
        """Name a session of this tenant, known or new."""
        return SessionRef(tenant=self.name, id=id, salt=self.salt)


class Key(NamedTuple):
    """A key as its line says it; the key itself cannot be made of that."""

    digest: bytes
    tenant: str
    limits: Limits | None  # None: the usual ones
    weight: int
    admin: bool = False

    @property
    def id(self) -> str:
        """Its name, which may be shown."""
        return self.digest[:8].hex()


class Tenants:
    """All tenants that may call. Without any key there is one, ``ANONYMOUS``."""

    def __init__(
        self, secret: bytes, key_lines: Iterable[str] = (), admin_lines: Iterable[str] = ()
    ) -> None:
        """
        Args:
            secret: at least 16 random bytes that stay the same over restarts.
            admin_lines: keys of the same form that see and manage all tenants.

        Raises:
            BadKeyLine: with the number of the line.
        """
        if len(secret) < 16:
            raise ValueError("the server's secret needs at least 16 bytes")
        self._secret = secret
        self._anonymous = Tenant(ANONYMOUS, self.salt_of(ANONYMOUS))
        self._keys = read_keys(key_lines)
        self._admin_keys = read_keys(admin_lines, admin=True)
        self.num_replaced = 0

    def replace(self, key_lines: Iterable[str], admin_lines: Iterable[str] = ()) -> None:
        """Take other keys from now on, all at once; turns that run go on.

        Raises:
            BadKeyLine: one cannot be read, or the last key would go, so that none were needed any
                more, or the first would come. The keys are as before.
        """
        keys, admin_keys = read_keys(key_lines), read_keys(admin_lines, admin=True)
        if bool(keys) != bool(self._keys):
            raise BadKeyLine(
                "whether API keys are needed cannot change while the server runs: start it again"
            )
        self._keys, self._admin_keys = keys, admin_keys
        self.num_replaced += 1

    @property
    def open_to_all(self) -> bool:
        """True if no key is needed, except for the admins' routes."""
        return not self._keys

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    @property
    def num_admin_keys(self) -> int:
        return len(self._admin_keys)

    def authenticate(self, authorization: str | None, x_api_key: str | None = None) -> Tenant:
        """Find the tenant whose key an ``Authorization`` header or an ``X-API-Key`` header holds.

        Raises:
            InvalidRequest: 401, no key, an unknown one, or two that differ: whose request it is
                must not be guessed.
        """
        keys = (*self._keys, *self._admin_keys)  # another thread may replace them meanwhile
        if not keys:
            return self._anonymous
        scheme, _, bearer = (authorization or "").partition(" ")
        bearer = bearer.strip() if scheme.lower() == "bearer" else ""
        key = bearer or (x_api_key or "").strip()
        if not key and self.open_to_all:
            return self._anonymous
        if not key:
            raise _unauthorised("No API key was sent. Send it as: Authorization: Bearer KEY.")
        if x_api_key and x_api_key.strip() != key:
            raise _unauthorised("Authorization and X-API-Key hold different keys: send one.")
        shown = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: Key | None = None
        # Always all of them, so that the time reveals nothing.
        for key_line in keys:
            if hmac.compare_digest(key_line.digest, shown):
                found = key_line
        if found is None and self.open_to_all:  # clients often send some word where none is needed
            return self._anonymous
        if found is None:
            raise _unauthorised("The API key is not valid here.")
        salt = self.salt_of(found.tenant)
        weight = max(x.weight for x in keys if x.tenant == found.tenant)
        return Tenant(found.tenant, salt, found.id, found.limits, found.admin, weight)

    def user(self, tenant: Tenant, user: str) -> Tenant:
        """Return a user of a tenant's, as a tenant: its sessions and cold data are its own.

        It is no admin: the holder of a front end's key, perhaps a user, chooses that header.

        Args:
            user: any text; one that is no plain word is shown as a hash, which no word can be.
        """
        if not _USER.fullmatch(user):
            said = user.encode("utf-8", "surrogateescape")
            user = _HASH_MARK + hashlib.blake2b(said, digest_size=12).hexdigest()
        name = f"{tenant.name}{_USER_MARK}{user}"
        key_id = f"{tenant.key_id}{_USER_MARK}{user}"
        return tenant._replace(name=name, salt=self.salt_of(name), key_id=key_id, admin=False)

    def bytes_of(self, tier: TierName, usual: Limits) -> dict[str, int]:
        """Return how many bytes of a tier each tenant may hold: the most that one of its keys says.

        0 = any number.
        """
        if not self._keys:
            found = {ANONYMOUS: [usual.bytes_of(tier)]}
        else:
            found = {}
            for key in (*self._keys, *self._admin_keys):
                nbytes = (key.limits or usual).bytes_of(tier)
                found.setdefault(key.tenant, []).append(nbytes)
        return {name: max(each) if all(each) else 0 for name, each in found.items()}

    def operator(self) -> Tenant:
        """Return who may open the admins' socket: an admin without a key."""
        return self._anonymous._replace(admin=True)

    def salt_of(self, name: str) -> bytes:
        """Derive a tenant's salt, 32 bytes, from the server's secret."""
        return self.key_of(name, b"salt")

    def key_of(self, name: str, purpose: bytes) -> bytes:
        """Derive a key of a tenant, 32 bytes; no purpose may be the beginning of another."""
        return hmac.digest(self._secret, purpose + name.encode(), "sha256")


def generate_key(tenant: str) -> tuple[str, str]:
    """Make a new key, to be shown once, and its line for the key list.

    Raises:
        BadKeyLine: ``tenant`` cannot be a tenant's name.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    line = f"{tenant}:{hashlib.sha256(key.encode()).hexdigest()}"
    read_key(line)
    return key, line


def read_key_lines(path: str) -> list[str]:
    """Read a key list. Raises ``OSError`` or ``UnicodeDecodeError``."""
    return Path(path).read_text(encoding="utf-8").splitlines()


def read_key(line: str) -> Key:
    """Read the line of a key; one that holds none raises ``BadKeyLine``, too."""
    for key in read_keys([line]):
        return key
    raise BadKeyLine("line 1 of the API keys holds no key")


def read_keys(lines: Iterable[str], *, admin: bool = False) -> list[Key]:
    """Read the lines of keys; empty ones and comments hold none. Raises ``BadKeyLine``."""
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
        try:
            words = read_numbers(found[3].strip(), (*Limits._fields, WEIGHT))
        except ValueError as error:
            raise BadKeyLine(f"line {number} of the API keys has {error}") from error
        weight = words.pop(WEIGHT, 1)
        if not 1 <= weight <= MAX_WEIGHT:
            raise BadKeyLine(
                f"line {number} of the API keys has weight={weight}; it is from 1 to {MAX_WEIGHT}"
            )
        limits = Limits(**words) if words else None
        keys.append(Key(bytes.fromhex(found[2]), found[1], limits, weight, admin))
    return keys


def read_numbers(text: str, known: Sequence[str]) -> dict[str, int]:
    """Read ``name=number`` words, which may follow a key. Raises ``ValueError``."""
    if not _NUMBERS.fullmatch(text):
        raise ValueError(f"{text[:80]!r}, which is no list such as requests_per_minute=60")
    given = {name: int(value) for name, _, value in (x.partition("=") for x in text.split())}
    if unknown := given.keys() - set(known):
        raise ValueError(f"a limit {min(unknown)!r}; there are {', '.join(known)}")
    return given


def _unauthorised(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_api_key", status=401)
