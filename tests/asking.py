"""One HTTP request to a server under test, and its answer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    content: Any  # what JSON stands for, or a text


def asked(
    url: str,
    body: Any = None,
    *,
    method: str | None = None,
    key: str = "",
    session: str = "",
    timeout_s: float = 120.0,
) -> Answer:
    """Ask with this API key, for a turn of this session; an error is an answer, too."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    if session:
        headers["x-session-id"] = session
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        content = answer.read().decode()
    is_json = "json" in (answer.headers["content-type"] or "")
    return Answer(answer.status, dict(answer.headers), json.loads(content) if is_json else content)
