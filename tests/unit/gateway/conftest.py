"""The app without sockets."""

from __future__ import annotations

import pytest

from tests.unit.gateway.in_process import App


@pytest.fixture
def app() -> App:
    return App()
