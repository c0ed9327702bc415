"""Methods that a test registers are gone after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.codecs.names import CODECS


@pytest.fixture(autouse=True)
def table_as_it_was() -> Iterator[None]:
    before = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(before)
