"""API keys, the tenants that they belong to, and the tenants' salts.

A key is 32 random bytes, so its plain SHA-256 is stored. The key that a caller sends is compared
with every known one in constant time. A tenant's salt is derived from the server's secret and
enters every chunk key of that tenant; it is never revealed, and no client can choose it.
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
_USER_MARK = "/"  # no tenant's name contains it
_HASH_MARK = "~"  # no match of ``_USER`` begins with it
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
WEIGHT = "weight"  # a further name in a key's line, after its limits
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-f]{64})((?:\s.*)?)")
_EXAMPLE = "requests_per_minute=60 ram_bytes=67108864"
_NUMBERS = re.compile(r"(?:[a-z_]+=[0-9]{1,15}\s*)*")


class BadKeyLine(Exception):
    """A line of the key list cannot be read. The message never quotes the line."""


class Limits(NamedTuple):
    """The limits of a key; 0 = no limit. ``sessions`` and ``*_bytes`` are for its whole tenant."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0
    sessions: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0

    def bytes_of(self, tier: TierName) -> int:
        """Return the limit in bytes of a tier; 0 for Redis, where only the server sets a bound."""
        return {"ram": self.ram_bytes, "disk": self.disk_bytes}.get(tier, 0)


class Tenant(NamedTuple):
    """A caller: its name, the salt that enters every key of its cold data, and its key's limits.

    With ``gateway.trust_user_header`` each user of a key is a tenant too, named ``TENANT/USER``.
    """

    name: str
    salt: bytes
    key_id: str = ""  # distinguishes keys of one tenant; no secret
    limits: Limits | None = None  # None: the usual ones
    admin: bool = False  # may see and manage all tenants' sessions
    weight: int = 1  # of its share of the engine: the largest weight among the tenant's keys

    def session(self, id: str) -> SessionRef:
        """Name a session of this tenant, known or new."""
        return SessionRef(tenant=self.name, id=id, salt=self.salt)


class Key(NamedTuple):
    """A key as its line describes it: by a hash, not by the key itself."""

    digest: bytes
    tenant: str
    limits: Limits | None  # None: the usual ones
    weight: int
    admin: bool = False

    @property
    def id(self) -> str:
        """The id under which lists and logs show the key; it is no secret."""
        return self.digest[:8].hex()


class Tenants:
    """All tenants that may call. If there are no keys, the only one is ``ANONYMOUS``."""

    def __init__(
        self, secret: bytes, key_lines: Iterable[str] = (), admin_lines: Iterable[str] = ()
    ) -> None:
        """
        Args:
            secret: at least 16 random bytes that stay the same over restarts.
            key_lines: lines of the form "tenant:sha256", see ``read_keys``.
            admin_lines: lines of the same form, for keys that see and manage all tenants.

        Raises:
            BadKeyLine: a line cannot be read; the message has its number.
        """
        if len(secret) < 16:
            raise ValueError("the server's secret needs at least 16 bytes")
        self._secret = secret
        self._anonymous = Tenant(ANONYMOUS, self.salt_of(ANONYMOUS))
        self._keys = read_keys(key_lines)
        self._admin_keys = read_keys(admin_lines, admin=True)
        self.num_replaced = 0

    def replace(self, key_lines: Iterable[str], admin_lines: Iterable[str] = ()) -> None:
        """Replace all keys at once; running turns go on.

        Raises:
            BadKeyLine: a line cannot be read; or the last key would be removed, or the first one
                added, which changes whether callers need a key. The keys stay as they were.
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
        """True if no key is needed, except for admin routes."""
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
            InvalidRequest: 401, the request has no key, an unknown one, or two that differ.
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
        # The loop always visits all keys, so that the time it takes reveals nothing.
        for key_line in keys:
            if hmac.compare_digest(key_line.digest, shown):
                found = key_line
        if found is None and self.open_to_all:  # many clients send a dummy key to such a server
            return self._anonymous
        if found is None:
            raise _unauthorised("The API key is not valid here.")
        salt = self.salt_of(found.tenant)
        weight = max(x.weight for x in keys if x.tenant == found.tenant)
        return Tenant(found.tenant, salt, found.id, found.limits, found.admin, weight)

    def user(self, tenant: Tenant, user: str) -> Tenant:
        """Return the tenant ``TENANT/USER``, whose sessions and cold data are separate.

        It is never an admin, since the holder of the key chooses the header that names the user.

        Args:
            user: any text; if it is not a plain word, a hash of it stands in its place.
        """
        if not _USER.fullmatch(user):
            said = user.encode("utf-8", "surrogateescape")
            user = _HASH_MARK + hashlib.blake2b(said, digest_size=12).hexdigest()
        name = f"{tenant.name}{_USER_MARK}{user}"
        key_id = f"{tenant.key_id}{_USER_MARK}{user}"
        return tenant._replace(name=name, salt=self.salt_of(name), key_id=key_id, admin=False)

    def bytes_of(self, tier: TierName, usual: Limits) -> dict[str, int]:
        """Return each tenant's limit in bytes of a tier, the largest of its keys; 0 = no limit.

        Args:
            usual: the limits of keys whose own lines set none.
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
        """Return the tenant of callers at the admins' socket: ``ANONYMOUS``, as an admin."""
        return self._anonymous._replace(admin=True)

    def salt_of(self, name: str) -> bytes:
        """Derive a tenant's salt, 32 bytes, from the server's secret."""
        return self.key_of(name, b"salt")

    def key_of(self, name: str, purpose: bytes) -> bytes:
        """Derive a key of a tenant, 32 bytes. No ``purpose`` may be the beginning of another."""
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
    """Read the lines of a key file. Raises ``OSError`` or ``UnicodeDecodeError``."""
    return Path(path).read_text(encoding="utf-8").splitlines()


def read_key(line: str) -> Key:
    """Read one key's line. Raises ``BadKeyLine``, also for an empty line or a comment."""
    for key in read_keys([line]):
        return key
    raise BadKeyLine("line 1 of the API keys holds no key")


def read_keys(lines: Iterable[str], *, admin: bool = False) -> list[Key]:
    """Read the keys of a list's lines, skipping empty lines and comments. Raises ``BadKeyLine``."""
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
        if not _NUMBERS.fullmatch(found[3].strip()):
            raise BadKeyLine(
                f"line {number} of the API keys has something after its hash that is no list of"
                f" whole numbers such as {_EXAMPLE}"
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
    """Read the ``name=number`` words of a key's line. Raises ``ValueError``."""
    if not _NUMBERS.fullmatch(text):
        raise ValueError(f"{text[:80]!r}, which is no list of whole numbers such as {_EXAMPLE}")
    given = {name: int(value) for name, _, value in (x.partition("=") for x in text.split())}
    if unknown := given.keys() - set(known):
        raise ValueError(f"a limit {min(unknown)!r}; there are {', '.join(known)}")
    return given


def _unauthorised(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_api_key", status=401)
