"""The link to a Redis server or cluster: a deadline, a circuit breaker, one error for callers.

The breaker stops calls to a server that does not answer. Without it every look-up would wait for a
whole deadline before the store recomputes.

    state        a call may go out      after a success   after a failure
    closed       yes                    closed            closed; open after `threshold` in a row
    open         no, until `wait_s`     -                 -
    half-open    one, the probe         closed            open, and `wait_s` doubles
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.client import RedisServers
from kvstore.urls import masked, secrets_of

try:
    import redis
    from redis.exceptions import AskError, RedisClusterException
except ImportError as error:
    raise ImportError("the redis tier needs redis-py: pip install 'thermocline[redis]'") from error

log = logging.getLogger(__name__)
Command: TypeAlias = tuple[bytes | str | int | memoryview, ...]
# A reply as redis-py returns it; for a command that the server refused, the list has its error.
Reply: TypeAlias = Any
T = TypeVar("T")
THRESHOLD: Final = 3
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 30.0
_KEYLESS: Final = frozenset({"PING", "TIME", "INFO"})


class BreakerState(enum.Enum):
    """The states of the table at the head of this module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The circuit breaker of one server. Thread-safe.

    Args:
        monotonic: seconds that never jump.
        threshold: how many failures in a row open it.
        longest_wait_s: the longest wait until the server is tried again.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        threshold: int = THRESHOLD,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self._monotonic = monotonic
        self._threshold = threshold
        self._longest_wait_s = longest_wait_s
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._wait_s = FIRST_WAIT_S
        self._opened_at = 0.0
        self._permit = 0  # changes with the state, so that results of older calls do not count

    @property
    def state(self) -> BreakerState:
        """The current state; still ``OPEN`` after the wait, until the next ``ask``."""
        return self._state

    def ask(self) -> int | None:
        """Return a permit to pass to ``succeed`` or ``fail``; None if no call is allowed."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return self._permit
            waited = self._monotonic() - self._opened_at >= self._wait_s
            if self._state is BreakerState.OPEN and waited:
                self._become(BreakerState.HALF_OPEN)
                return self._permit
            return None

    def succeed(self, permit: int) -> None:
        """Note that the server answered the call of this permit."""
        with self._lock:
            if permit != self._permit:
                return
            self._failures = 0
            if self._state is BreakerState.HALF_OPEN:
                self._wait_s = FIRST_WAIT_S
                self._become(BreakerState.CLOSED)

    def fail(self, permit: int) -> None:
        """Note that the server did not answer the call of this permit."""
        with self._lock:
            if permit != self._permit:
                return
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN:
                self._wait_s = min(2 * self._wait_s, self._longest_wait_s)
                self._open()
            elif self._failures >= self._threshold:
                self._open()

    def _open(self) -> None:
        self._opened_at = self._monotonic()
        self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        self._state = state
        self._permit += 1


class RedisLink:
    """Runs command batches against one server, or the nodes of a cluster. Thread-safe.

    Args:
        url: see ``client``. Nothing is connected before the first run.
        deadline_s: the time for one batch, connecting included. Each wait for bytes is limited to
            half of it, so a batch to one server takes at most one and a half times this.
        longest_wait_s: the longest wait until a server that did not answer is tried again.

    Raises:
        ValueError: ``url`` is not valid; the message does not contain its password.
    """

    def __init__(
        self,
        url: str,
        deadline_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self.name = masked(url)
        self._secrets = secrets_of(url)
        self.deadline_s = deadline_s
        self._monotonic = monotonic
        self._breaker = Breaker(monotonic, longest_wait_s=longest_wait_s)
        self._counting = threading.Lock()
        self._num_errors = 0
        self._answered = False  # whether the server has ever answered
        self._closed = False
        try:
            self._servers = RedisServers(url, deadline_s / 2)
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
        """Return the time, of ``monotonic``, at which a call that starts now must end."""
        return self._monotonic() + self.deadline_s

    def run(self, commands: Sequence[Command], until: float | None = None) -> list[Reply]:
        """Send all commands, then read all replies, in order.

        In place of a reply the list has the error of a command that the server refused. In a
        cluster each command goes to the node that has its key; one without a key to any node.

        Args:
            until: as ``deadline`` returns it; None = the deadline of a call that starts now.

        Raises:
            TierUnavailable: no connection, no answer before ``until``, or the breaker is open.
        """
        end = self.deadline() if until is None else until
        return self._guarded(lambda: self._exchange(commands, end))

    def call(self, use: Callable[[Any], T]) -> T:
        """Return the result of ``use``, which is called with a ``Redis`` or a ``RedisCluster``.

        Raises:
            TierUnavailable: a command was refused or not answered, or the breaker is open.
        """
        return self._guarded(lambda: use(self._servers.client()))

    def _guarded(self, call: Callable[[], T]) -> T:
        permit = self._breaker.ask()
        if permit is None:
            raise TierUnavailable(f"redis tier: {self.name} did not answer lately")
        answered = False
        try:
            result = call()
            answered = self._answered = True
            return result
        except redis.ResponseError as error:  # a refusal, which counts as an answer
            answered = self._answered = True
            raise self._unavailable(error) from None
        except (redis.RedisError, RedisClusterException, OSError, _TooLate) as error:
            self._servers.forget()
            raise self._unavailable(error) from None
        except Exception as error:
            if not self._closed:
                raise
            # redis-py may raise anything when ``close`` closes its socket on another thread.
            raise self._unavailable(error) from None
        finally:
            (self._breaker.succeed if answered else self._breaker.fail)(permit)

    def _exchange(self, commands: Sequence[Command], until: float) -> list[Reply]:
        replies: list[Reply] = [None] * len(commands)
        for server, positions in self._by_server(commands):
            self._check_time(until)
            with server.pipeline(transaction=False) as asked:
                for i in positions:
                    asked.execute_command(*commands[i])
                for i, reply in zip(positions, asked.execute(raise_on_error=False), strict=True):
                    replies[i] = _plain(reply)
        for i, reply in enumerate(replies):
            # ASK, or its subclass MOVED: the node did not run the command.
            if self._servers.is_cluster and isinstance(reply, AskError):
                self._check_time(until)
                replies[i] = self._redirected(commands[i])
        return replies

    def _by_server(self, commands: Sequence[Command]) -> Iterable[tuple[Any, Sequence[int]]]:
        if not self._servers.is_cluster:
            return [(self._servers.client(), range(len(commands)))] if commands else ()
        found: dict[int, tuple[Any, list[int]]] = {}
        for i, command in enumerate(commands):
            server = self._servers.node_of(_key_of(command))
            found.setdefault(id(server), (server, []))[1].append(i)
        return found.values()

    def _redirected(self, command: Command) -> Reply:
        """Send a command again through the cluster's client, which follows redirections."""
        try:
            return self._servers.client().execute_command(*command)
        except redis.ResponseError as error:
            return error

    def _check_time(self, until: float) -> None:
        if self._monotonic() > until:
            raise _TooLate(f"no full answer within {self.deadline_s} s")

    def _unavailable(self, error: Exception) -> TierUnavailable:
        text = self._scrub(f"{type(error).__name__}: {error}")
        self.count(text)
        return TierUnavailable(f"redis tier: {self.name}: {text}")

    def count(self, what: str) -> None:
        """Count an error; also log the first one."""
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
        """Close all connections; a running call on another thread raises ``TierUnavailable``."""
        self._closed = True
        self._servers.close()


class _TooLate(Exception):
    pass


def _key_of(command: Command) -> bytes | str | None:
    """Return a command's first key; None if it has none."""
    if command[0] in _KEYLESS:
        return None
    key = command[3] if command[0] == "EVAL" else command[1]
    return key if isinstance(key, bytes | str) else bytes(key)


def _plain(reply: Reply) -> Reply:
    """Return a reply; an error without the command that redis-py puts before its message."""
    if isinstance(reply, redis.ResponseError) and reply.args:
        reply.args = (str(reply.args[0]).rpartition("caused error: ")[2], *reply.args[1:])
    return reply
