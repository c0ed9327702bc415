"""Addresses of servers as people write them."""

from __future__ import annotations

import pytest

from launch.cli.remote import Remote
from launch.errors import LaunchError, UsageError
from launch.remote import Address, server_url


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8080", "http://localhost:8080"),
        (" 10.0.0.7:80/ ", "http://10.0.0.7:80"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("gpu-box", "http://gpu-box"),
        ("localhost:8080/v1", "http://localhost:8080"),
        ("http://localhost:8080/v1/", "http://localhost:8080"),
        ("https://example.org/prefix/v1", "https://example.org/prefix"),
    ],
)
def test_an_address_is_understood_with_and_without_its_scheme(given, url):
    assert server_url(given) == url
    assert Address(given).base == url


@pytest.mark.parametrize(
    "given", [":8080", "localhost:eighty", "ftp://host", "http://", "unix:/run/x", "a:70000"]
)
def test_text_that_is_no_address_is_refused(given):
    with pytest.raises(UsageError, match="is no address; write http://host:port"):
        server_url(given)


def test_every_command_that_asks_a_server_understands_it():
    with pytest.raises(LaunchError, match="http://127.0.0.1:1 does not answer"):
        Remote("127.0.0.1:1").models()
    with pytest.raises(UsageError, match="is no address"):
        Remote("ftp://127.0.0.1:1")
    with pytest.raises(LaunchError, match="Name another address with --url"):
        Remote("unix:/no/such/socket").models()
    with pytest.raises(LaunchError, match="does not answer"):
        Remote("http://example..com").models()
