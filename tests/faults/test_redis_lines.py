"""The line to a Redis server: late and torn, encrypted or not, to a node that points elsewhere."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.redis_tier import RedisTier
from launch.doctor import examine
from launch.settings.effective_settings import effective_settings
from launch.settings.sources import Value
from tests.faults.redis_tiers import LONGEST_S, SlowLine, blobs, tier_at
from tests.redis_server import BOUNDED, RedisServer, node_of_a_cluster
from tests.waiting import until

pytestmark = pytest.mark.redis


@pytest.fixture
def far() -> Iterator[RedisServer]:
    with RedisServer(tcp=True) as running:
        yield running


# ---- late and torn


@pytest.mark.slow
def test_a_late_line_that_breaks_now_and_then(far: RedisServer) -> None:
    """50 ms each way, a reset in every hundredth piece: right blobs or none, and none too late."""
    stored = blobs(6, 60_000)
    deadline_s = 2.0
    with (
        SlowLine(far.url, 100_000_000, latency_s=0.05, reset_share=0.01) as line,
        tier_at(line.url, deadline_s=deadline_s) as (tier, _),
    ):
        came = refused = 0
        end = time.monotonic() + 300
        while line.num_resets < 5 or came < 20:
            assert time.monotonic() < end, (line.num_resets, came)
            started = time.monotonic()
            try:
                tier.put_many(list(stored.items()))
                for key, found in zip(stored, tier.get_many(list(stored)), strict=True):
                    assert found in (None, stored[key])
                    came += found is not None
            except TierUnavailable:
                refused += 1
            assert time.monotonic() - started < 2 * (1.5 * deadline_s + 1.0)
        assert refused  # the resets were noticed
        line.reset_share = 0.0
        until(lambda: _all_there(tier, stored), what="all is there again")


def _all_there(tier: RedisTier, stored: Mapping[bytes, bytes]) -> bool:
    try:
        tier.put_many(list(stored.items()))
        return tier.get_many(list(stored)) == list(stored.values())
    except TierUnavailable:
        return False


# ---- encrypted


class TlsLine:
    """A server that speaks TLS in front of one that does not; its certificate signs itself."""

    def __init__(self, url: str, folder: Path) -> None:
        self._target = int(url.rpartition(":")[2].partition("/")[0])
        self.certificate = folder / "certificate.pem"
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
            .sign(key, hashes.SHA256())
        )
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        private = folder / "key.pem"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(self.certificate, private)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        """One request at a time: the reply to each is passed on until the server has no more."""
        with (
            suppress(OSError),
            plain,
            socket.create_connection(("127.0.0.1", self._target)) as backend,
            self._tls.wrap_socket(plain, server_side=True) as near,
        ):
            near.settimeout(0.01)
            backend.settimeout(0.01)
            while True:
                with suppress(TimeoutError):
                    if not (asked := near.recv(65536)):
                        return
                    backend.settimeout(5)
                    backend.sendall(asked)
                    backend.settimeout(0.01)
                with suppress(TimeoutError):
                    while answer := backend.recv(65536):
                        near.settimeout(5)
                        near.sendall(answer)
                        near.settimeout(0.01)


@pytest.fixture
def encrypted(far: RedisServer, tmp_path: Path) -> Iterator[TlsLine]:
    line = TlsLine(far.url, tmp_path)
    yield line
    line.close()


def test_an_encrypted_line_serves_who_trusts_its_certificate(encrypted: TlsLine) -> None:
    stored = blobs(3, 200_000)
    url = f"rediss://localhost:{encrypted.port}/0?ssl_ca_certs={encrypted.certificate}"
    with tier_at(url, deadline_s=10.0) as (tier, _):
        assert tier.put_many(list(stored.items())) == 3
        assert tier.get_many(list(stored)) == list(stored.values())


def test_who_does_not_know_the_certificate_is_refused_with_its_reason(encrypted: TlsLine) -> None:
    url = f"rediss://localhost:{encrypted.port}/0"
    with (
        tier_at(url, deadline_s=10.0) as (tier, _),
        pytest.raises(TierUnavailable, match="(?i)certificate"),
    ):
        tier.get_many([b"k"])


def test_one_side_encrypts_and_the_other_does_not(far: RedisServer, encrypted: TlsLine) -> None:
    """Refused within the deadline, both ways round."""
    for url in (far.url.replace("redis:", "rediss:"), f"redis://localhost:{encrypted.port}/0"):
        with tier_at(url) as (tier, _):
            started = time.monotonic()
            with pytest.raises(TierUnavailable, match="redis tier: redis"):
                tier.get_many([b"k"])
            assert time.monotonic() - started < LONGEST_S


# ---- elsewhere


def port_of(server: RedisServer) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


def test_a_node_of_a_cluster_refuses_keys_of_other_nodes_and_serves_the_rest() -> None:
    """MOVED, and CLUSTERDOWN where no node has the slot: no blob, counted, and the link stays."""
    stored = blobs(40, 3_000)
    partial = ("--cluster-require-full-coverage", "no")
    with node_of_a_cluster(*partial) as one, node_of_a_cluster(*partial) as other:
        nodes = [redis.Redis.from_url(x.url) for x in (one, other)]
        for node, first in zip(nodes, (0, 8192), strict=True):
            node.execute_command("CLUSTER", "ADDSLOTS", *range(first, first + 8192))
        until(lambda: _info_of(nodes[0], "cluster_state") == "ok", what="up")
        with tier_at(one.url, deadline_s=5.0) as (tier, _):
            assert 0 < tier.put_many(list(stored.items())) < 40  # CLUSTERDOWN for the others
            nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port_of(other))
            until(lambda: _info_of(nodes[0], "cluster_slots_ok") == "16384", what="met")
            kept = tier.put_many(list(stored.items()))  # MOVED
            assert kept < 40
            assert tier.stats().errors > 0 and tier.stats().available
            found = dict(zip(stored, tier.get_many(list(stored)), strict=True))
            there = {key for key, blob in found.items() if blob is not None}
            assert 0 < len(there) < 40
            assert all(found[key] == stored[key] for key in there)
            present = tier.contains_many(list(stored))
            assert {key for key, here in zip(stored, present, strict=True) if here} == there
            assert tier.delete_many(list(there)) == len(there)
        for node in nodes:
            node.close()


def _info_of(node: redis.Redis, name: str) -> str:
    return str(node.execute_command("CLUSTER INFO")[name])


# ---- what the doctor says


def doctors_word(url: str, home: Path) -> tuple[str, str]:
    """What ``thermocline doctor`` finds of a server."""
    layer = {"store.redis_url": Value(url, "test"), "engine.kind": Value("fake", "test")}
    effective = effective_settings([layer], {"HOME": str(home)})
    (found,) = (x for x in examine(effective, {}) if x.about == "redis")
    return found.verdict, found.text


def test_the_doctor_says_what_is_wrong_with_a_server(far, encrypted, tmp_path):
    with RedisServer("--requirepass", "correct-horse", *BOUNDED, tcp=True) as closed:
        right, wrong = closed.url, closed.url.replace("correct", "battery")
        assert doctors_word(right, tmp_path)[0] == "ok"
        verdict, words = doctors_word(wrong, tmp_path)
        assert verdict == "failure" and "password" in words and "battery" not in words
    trusted = f"rediss://localhost:{encrypted.port}/0"
    verdict, words = doctors_word(trusted, tmp_path)
    assert verdict == "failure" and "certificate" in words.lower()
    assert doctors_word(far.url.replace("redis:", "rediss:"), tmp_path)[0] == "failure"
    with redis.Redis.from_url(far.url) as client:
        verdict, words = doctors_word(far.url, tmp_path)
        assert verdict == "warning" and "no maxmemory" in words
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        verdict, words = doctors_word(far.url, tmp_path)
    assert verdict == "failure" and "refuses writes" in words and "read only" in words
    with node_of_a_cluster() as node:  # without any slot
        verdict, words = doctors_word(node.url, tmp_path)
    assert verdict == "failure" and ("CLUSTERDOWN" in words or "not served" in words)
