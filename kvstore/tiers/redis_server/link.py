"""The link to a Redis server or cluster: deadlines, one kind of error for callers.

redis-py keeps the connections and implements the protocol; command batches are sent over them by
``servers``, since only then can a deadline hold *between* the replies of one pipeline. No command
is ever retried: a miss costs a prefill, and a retry would cost the same time again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.breaker import LONGEST_WAIT_S, Breaker, BreakerState

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import NoPermissionError
    from redis.retry import Retry

    from kvstore.tiers.redis_server.servers import (
        THEN,
        Command,
        Reply,
        Servers,
        exchange,
        open_servers,
    )
except ImportError as error:
    raise ImportError("the redis tier needs redis-py: pip install 'thermocline[redis]'") from error

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
READ_BYTES = 256 << 10
PASSWORDS = ("password", "sentinel_password")  # fields of a URL's query


class RedisLink:
    """Runs command batches against one server, or the nodes of a cluster. Thread-safe.

    Args:
        url: see ``pools`` and ``cluster``. Nothing is connected before the first run.
        deadline_s: for one batch, connecting included. A silent server is given up after half of
            it, so that a batch never takes longer than one and a half times this.
        longest_wait_s: until a server that did not answer is tried again.

    Raises:
        ValueError: not a URL; the message does not repeat its password.
    """

    def __init__(
        self,
        url: str,
        deadline_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self.name = masked(url)
        self._secrets = _secrets(url)
        self._deadline_s = deadline_s
        self._monotonic = monotonic
        self._breaker = Breaker(monotonic, longest_wait_s=longest_wait_s)
        self._counting = threading.Lock()
        self._num_errors = 0
        self._answered = False  # ever
        self._closed = False
        self._deletes = False  # the access rules forbid UNLINK
        try:
            self._servers: Servers = open_servers(
                url,
                protocol=2,
                max_connections=MAX_CONNECTIONS,
                timeout=deadline_s,
                socket_timeout=deadline_s / 2,
                socket_connect_timeout=deadline_s / 2,
                socket_read_size=READ_BYTES,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ValueError(f"redis_url {self.name}: {self._scrub(str(error))}") from None

    def __repr__(self) -> str:
        return f"RedisLink({self.name})"

    @property
    def available(self) -> bool:
        """True while the server answers.

        False until the first answer, and from the failure that opens the breaker to the probe that
        succeeds.
        """
        return self._answered and self._breaker.state is BreakerState.CLOSED

    @property
    def num_errors(self) -> int:
        """The number of errors counted so far."""
        return self._num_errors

    def deadline(self) -> float:
        """Return the moment at which a call that starts now must be over."""
        return self._monotonic() + self._deadline_s

    def run(
        self, commands: Sequence[Command], until: float | None = None, at: Any = None
    ) -> list[Reply]:
        """Send all commands, then read all replies, in order; ``THEN`` has no reply.

        The list has the error of a command that the server refused. Where the access rules forbid
        ``UNLINK``, it is sent again as ``DEL``. Of a cluster each command goes to the node that has
        its key, and those without a key to the node of the first key.

        Args:
            at: one of ``servers``, which gets all of them.

        Raises:
            TierUnavailable: no connection, no answer before ``until``, or the breaker is open.
        """
        if self._deletes:
            commands = [_as_del(x) for x in commands]
        replies = self._sent(commands, until, at)
        asked = [x for x in commands if x is not THEN]
        refused = [i for i, x in enumerate(replies) if _is_forbidden(asked[i], x)]
        if refused:
            log.info("redis tier %s: the access rules forbid UNLINK; DEL is used", self.name)
            self._deletes = True
            again = self._sent([_as_del(asked[i]) for i in refused], until, at)
            for i, reply in zip(refused, again, strict=True):
                replies[i] = reply
        return replies

    def _sent(self, commands: Sequence[Command], until: float | None, at: Any) -> list[Reply]:
        permit = self._breaker.ask()
        if permit is None:
            raise TierUnavailable(f"redis tier: {self.name} did not answer lately")
        answered = False
        try:
            replies = self._exchange(commands, self.deadline() if until is None else until, at)
            answered = self._answered = True
            return replies
        except (redis.RedisError, OSError, _TooLate) as error:
            self._servers.forget()
            raise self._unavailable(error) from None
        except Exception as error:
            if not self._closed:
                raise
            # redis-py is not prepared for a socket that another thread closes.
            raise self._unavailable(error) from None
        finally:
            (self._breaker.succeed if answered else self._breaker.fail)(permit)

    def servers(self) -> list[Any]:
        """Return what ``run`` takes as ``at``: every server that has keys.

        Raises:
            TierUnavailable: no node of a cluster answers.
        """
        until = self.deadline()
        try:
            return self._servers.pools(lambda: self._check_time(until))
        except (redis.RedisError, OSError, _TooLate) as error:
            raise self._unavailable(error) from None

    def _exchange(self, commands: Sequence[Command], until: float, at: Any) -> list[Reply]:
        def check_time() -> None:
            self._check_time(until)

        replies: list[Reply] = []
        for batch in self._servers.in_order(commands):
            if at is None:
                replies += self._servers.ask(batch, check_time)
            else:
                replies += exchange([(at, batch)], check_time)[0]
        return replies

    def _check_time(self, until: float) -> None:
        if self._monotonic() > until:
            raise _TooLate(f"no full answer within {self._deadline_s} s")

    def _unavailable(self, error: Exception) -> TierUnavailable:
        text = self._scrub(f"{type(error).__name__}: {error}")
        self.count(text)
        return TierUnavailable(f"redis tier: {self.name}: {text}")

    def count(self, what: str) -> None:
        """Count an error; the first one of this process is logged as well."""
        with self._counting:
            self._num_errors += 1
            first = self._num_errors == 1
        if first:
            log.warning("redis tier %s: %s (further errors are only counted)", self.name, what)

    def _scrub(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def close(self) -> None:
        """Close all connections; threads that wait at one in use get ``TierUnavailable``."""
        self._closed = True
        self._servers.close()


class _TooLate(Exception):
    pass


def _is_forbidden(command: Command, reply: Reply) -> bool:
    return command[0] == "UNLINK" and isinstance(reply, NoPermissionError)


def _as_del(command: Command) -> Command:
    return ("DEL", *command[1:]) if command is not THEN and command[0] == "UNLINK" else command


def masked(url: str) -> str:
    """Return the URL with every password replaced; ``***`` if it is not a URL."""
    parts = urlsplit(url)
    if "@" in parts.path or "@" in parts.scheme or not parts.scheme:
        return "***"
    if not _secrets(url):
        return url
    address = parts.netloc
    if "@" in address:
        login, _, host = address.rpartition("@")
        user, colon, _ = login.partition(":")
        address = f"{user}{':***' if colon else ''}@{host}"
    query = [(k, "***" if k in PASSWORDS else v) for k, v in parse_qsl(parts.query)]
    return urlunsplit(parts._replace(netloc=address, query=urlencode(query, safe="*/")))


def _secrets(url: str) -> list[str]:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    found = [x for x in (parts.password, *map(query.get, PASSWORDS)) if x]
    return found + [unquote(x) for x in found]
