"""URLs that may contain passwords, in a form that can be shown and logged."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

_PASSWORDS: Final = ("password", "sentinel_password")  # fields of a URL's query


def masked(url: str) -> str:
    """Return the URL with every password replaced; ``***`` if it is not a URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "***"
    fields = [x for x in parts.query.split("&") if x.partition("=")[0] not in _PASSWORDS]
    if not parts.scheme or "@" in "".join((parts.scheme, parts.path, parts.fragment, *fields)):
        return "***"  # a password may have a character that ends the address
    if not secrets_of(url):
        return url
    address = parts.netloc
    if "@" in address:
        login, _, host = address.rpartition("@")
        user, colon, _ = login.partition(":")
        address = f"{user}{':***' if colon else ''}@{host}"
    query = [(k, "***" if k in _PASSWORDS else v) for k, v in parse_qsl(parts.query)]
    return urlunsplit(parts._replace(netloc=address, query=urlencode(query, safe="*/")))


def secrets_of(url: str) -> list[str]:
    """Return the passwords in a URL, as they are written there and decoded."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    found = [x for x in (parts.password, *map(query.get, _PASSWORDS)) if x]
    return found + [unquote(x) for x in found]
