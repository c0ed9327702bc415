"""Checks what a request's head says it is for: one host, and a path of this server.

Two servers in a row that read a request differently can be made to see two requests where there is
one. What may be read in two ways is refused (RFC 9112, 3.2 and 6.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import httptools

Fields = Sequence[tuple[bytes, bytes]]


def objection(method: bytes, target: bytes, version: str, fields: Fields) -> str:
    """Return why a head can be read in two ways, as a sentence; "" if it cannot.

    Args:
        fields: names in lower case, and values.
    """
    hosts = [value for name, value in fields if name == b"host"]
    if len(hosts) > 1:
        return "The request has more than one Host header."
    if version == "1.0" and any(name == b"transfer-encoding" for name, _ in fields):
        return "HTTP/1.0 has no Transfer-Encoding."
    if target.startswith(b"/") or (method == b"OPTIONS" and target == b"*"):
        return ""
    if method == b"CONNECT":
        return "This server is no proxy."
    return _objection_to_absolute(target, hosts)


def _objection_to_absolute(target: bytes, hosts: Sequence[bytes]) -> str:
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return "The request's target is neither a path nor a URL."
    if url.schema not in (b"http", b"https") or not url.host or url.userinfo:
        return "The request's target is neither a path nor a URL."
    authority = url.host if url.port is None else b"%s:%d" % (url.host, url.port)
    named = hosts[0].strip().lower().replace(b"[", b"").replace(b"]", b"") if hosts else b""
    if authority.lower() != named:
        return "The request's target and its Host header name different servers."
    return ""
