"""The real gateway with the fake engine, two tenants, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key
from tests.asking import asked
from tests.integration.dashboard.browser import Browser, chromium

KEYS = {
    tenant: generate_key(tenant)
    for tenant in ("alice", "bob", "carol", "dora", "erin", "quiet", "root")
}


class Server:
    """The stack, and chats with it that bypass the page."""

    def __init__(self, stack: FakeStack) -> None:
        self.stack = stack
        self.url = stack.url

    def chat(self, tenant: str, session: str, *texts: str) -> None:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        body = {"model": MODEL, "messages": messages}
        self.post(tenant, "/v1/chat/completions", body, session)

    def post(self, tenant: str, path: str, body: Any = None, session: str = "") -> None:
        answer = asked(self.url + path, body or {}, key=KEYS[tenant][0], session=session)
        assert answer.status in (200, 202)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stack")
    lines = [line for tenant, (_, line) in KEYS.items() if tenant != "root"]
    settings = {"api_keys": lines, "admin_keys": [KEYS["root"][1]]}
    with FakeStack(folder, gateway=settings) as stack:
        yield Server(stack)


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    with chromium() as launched:
        yield Browser(launched, server.url)


@pytest.fixture(autouse=True)
def no_other_host_was_asked(browser: Browser) -> Iterator[None]:
    yield
    browser.check()
