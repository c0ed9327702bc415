"""Addresses of servers as people write them."""

from __future__ import annotations

import pytest

from launch.errors import LaunchError, UsageError
from launch.remote.server import Address, Remote, server_url
from tests.asking import http_ok, saying


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
    if not given.startswith("unix:"):  # which is an address for this machine's own commands
        with pytest.raises(UsageError, match="is no address"):
            Remote(given)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:1", "connection refused"),
        ("unix:/no/such/socket", "no such file or directory"),
        ("http://example..com", "no such host"),
    ],
)
def test_a_server_that_is_away_is_spoken_of_in_plain_words(address, reason):
    with pytest.raises(LaunchError) as caught:
        Remote(address).models()
    assert f"{address} does not answer ({reason}); is `thermocline serve`" in str(caught.value)
    assert "Name another address with --url" in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "said", "reason"),
    [
        ("http", b"", "the connection was closed"),
        ("http", b"hello\r\n\r\n", "the answer is no HTTP"),
        ("https", b"hello\r\n\r\n", "no TLS connection: wrong version number"),
    ],
)
def test_a_server_of_another_kind_is_spoken_of_in_plain_words(scheme, said, reason):
    with saying(said) as address, pytest.raises(LaunchError) as caught:
        Remote(f"{scheme}://{address}").models()
    assert f" does not answer ({reason}); is" in str(caught.value)


@pytest.mark.parametrize(
    "listed", [b'{"data": [{"id": "a"}]}', b'{"data": "none"}', b'{"data": [1]}', b"{}"]
)
def test_a_list_of_something_else_is_no_list_of_sessions(listed):
    with (
        saying(http_ok(listed)) as address,
        pytest.raises(LaunchError, match="not a Thermocline gateway: it lists other"),
    ):
        Remote(f"http://{address}").sessions()
