"""Runs a fleet through its users' turns, event by event.

A request goes to the replica that ``engines.fleet`` chooses, finds there what a ledger has kept,
reads it over the links that it needs, waits for the engine's prefill, and answers. Prefill and
unpacking are each done one after the other in an engine; answers do not disturb each other. What
is read from and written to the shared tier goes through one link of a given speed.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from engines.base import Engine, SessionRef
from engines.fleet.choice import Choice
from engines.fleet.fleet_engine import MOVES_AT, MOVES_AT_ALONE
from engines.fleet.homes import Homes
from engines.fleet.replica import Replica
from launch.simulation.conditions import Conditions, ModelSize
from launch.simulation.machine import Reuse, SimulatedEngine
from launch.simulation.sized_tier import Link, SizedTier

AWAY_S: Final = 120.0  # until a machine that was lost is there again
TENANT: Final = "local"  # as a gateway without keys calls its only one


@dataclass
class Turn:
    """One turn, as it went."""

    user: int
    session: str
    number: int  # in its conversation, from 0
    prompt_tokens: int
    machine: int = 0
    came_s: float = 0.0
    source: str = ""
    reused_tokens: int = 0
    first_token_s: float = 0.0  # since it came
    counted: bool = False  # not one of the first, which fill the fleet
    is_return: bool = False  # something of it was stored when it came
    lost_home: bool = False  # its home is the machine that was lost
    was_cut: bool = False  # the machine was lost while it was answered

    @property
    def is_hit(self) -> bool:
        return self.source != "miss"


@dataclass
class _User:
    number: int
    fleet: _Fleet
    conversation: int
    turn: int  # the next one of the conversation
    tokens: int = 0  # of the conversation so far
    num_done: int = 0
    is_stored: bool = False  # the conversation has had a turn
    lost_home: bool = False

    @property
    def session(self) -> SessionRef:
        return SessionRef(TENANT, f"{self.number}.{self.conversation}", b"")


class _Fleet:
    """The replicas of one model, one on each machine."""

    def __init__(self, conditions: Conditions, size: ModelSize, clock: Callable[[], float]) -> None:
        shared = None
        if conditions.shared_bytes_s:
            part = conditions.shared_bytes // len(conditions.models)
            shared = SizedTier("redis", part, clock)
        self.engines = [
            SimulatedEngine(conditions, size, shared, clock) for _ in range(conditions.machines)
        ]
        self.replicas = [
            Replica(str(i), cast(Engine, engine), clock) for i, engine in enumerate(self.engines)
        ]
        self.homes = Homes(conditions.users * 2)
        moves_at = MOVES_AT if shared is not None else MOVES_AT_ALONE
        self.choice = Choice(self.replicas, self.homes, moves_at)
        self.numbers = {x.name: i for i, x in enumerate(self.replicas)}


class Simulation:
    """One run. ``on_turn`` is called with each turn when its first token is there.

    Args:
        on_turn: in the order in which turns come.
    """

    def __init__(self, conditions: Conditions, on_turn: Callable[[Turn], None]) -> None:
        self._conditions = conditions
        self._on_turn = on_turn
        self._now_s = 0.0
        self._random = random.Random(conditions.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.link = Link(conditions.shared_bytes_s)
        self._fleets = [_Fleet(conditions, x, lambda: self._now_s) for x in conditions.models]
        self._users = [
            _User(
                i,
                self._fleets[i % len(self._fleets)],
                0,
                self._random.randrange(conditions.habits.turns),
            )
            for i in range(conditions.users)
        ]
        self.num_moves = {"load": 0, "away": 0}
        self.warm_s = 0.0  # when every user had come once, on average
        self.lost_at_s: float | None = None
        self._num_turns = 0
        self._running: dict[int, list[Turn]] = {}  # by machine

    @property
    def seconds(self) -> float:
        """The time that was simulated, in seconds."""
        return self._now_s

    def run(self) -> None:
        """Let users take turns until there were enough of them."""
        # Nothing here is part of a cycle, and the collector would look at millions of objects.
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            self._run()
        finally:
            if is_enabled:
                gc.enable()

    def _run(self) -> None:
        conditions = self._conditions
        for user in self._users:
            self._come_later(user)
        warm, most = conditions.users, conditions.users * conditions.turns_per_user
        loses_after = (
            most * 2 // 3 if conditions.loses_machine and conditions.machines > 1 else most
        )
        while self._num_turns < most:
            self._now_s, _, happens = heapq.heappop(self._events)
            happens()
            if self._num_turns <= warm:
                self.warm_s = self._now_s
            if loses_after <= self._num_turns < most and self.lost_at_s is None:
                self._lose_first()

    def _come_later(self, user: _User) -> None:
        self._at(self._pause(), partial(self._come, user))

    def _at(self, delay_s: float, happens: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._num_events, happens))

    def _pause(self) -> float:
        return -self._conditions.habits.think_s * math.log(1.0 - self._random.random())

    # ---- a turn

    def _come(self, user: _User, was_cut: bool = False) -> None:
        habits, fleet = self._conditions.habits, user.fleet
        if user.turn >= habits.turns:
            user.conversation, user.turn, user.tokens = user.conversation + 1, 0, 0
            user.is_stored = user.lost_home = False
        if not user.is_stored:  # one that begins in the middle of a conversation brings it along
            user.tokens = user.turn * habits.turn_tokens
        prompt = user.tokens + habits.turn_tokens - habits.answer_tokens
        turn = Turn(user.number, user.session.id, user.turn, prompt, came_s=self._now_s)
        turn.counted = user.num_done > 0
        turn.is_return = user.is_stored
        turn.lost_home, turn.was_cut = user.lost_home, was_cut
        replica = self._chosen(fleet, user)
        turn.machine = fleet.numbers[replica.name]
        self._num_turns += 1
        self._answer(user, turn, fleet.engines[turn.machine], replica)

    def _chosen(self, fleet: _Fleet, user: _User) -> Replica:
        session = user.session
        home, replica = fleet.choice.home(session), fleet.choice.choose(session)
        fleet.homes.put(session, replica.name)
        if home is not None and home is not replica:
            self.num_moves["load" if home.takes else "away"] += 1
            fleet.engines[fleet.numbers[home.name]].drop(session)
        replica.num_running += 1
        return replica

    def _answer(self, user: _User, turn: Turn, engine: SimulatedEngine, replica: Replica) -> None:
        speeds, habits = self._conditions.speeds, self._conditions.habits
        found = engine.find(user.session) if user.is_stored else Reuse("miss")
        ready_s = self._restored_at(engine, found)
        turn.source, turn.reused_tokens = found.source, found.tokens
        # Conversations that are older than the simulation were computed before it began.
        older = user.tokens if not user.num_done else 0
        missing = max(1, turn.prompt_tokens - max(found.tokens, older))
        began_s = max(ready_s, engine.prefill_free_at)
        engine.prefill_free_at = began_s + missing / speeds.prefill_tokens_s
        turn.first_token_s = engine.prefill_free_at - turn.came_s
        engine.run(user.session)
        self._on_turn(turn)
        running = self._running.setdefault(turn.machine, [])
        running.append(turn)
        life = engine.welcome
        ends_s = engine.prefill_free_at + habits.answer_tokens / speeds.answer_tokens_s

        def end() -> None:
            replica.num_running -= 1
            if engine.welcome is not life or not engine.ready:  # the client asks once more
                self._come(user, was_cut=True)
                return
            running.remove(turn)
            user.tokens += habits.turn_tokens
            written = engine.save(user.session, user.tokens, is_new=not user.is_stored)
            new = habits.turn_tokens / user.tokens if not user.num_done else 1.0
            self.link.write(self._now_s, int(written.get("redis", 0) * new))
            user.turn, user.num_done = user.turn + 1, user.num_done + 1
            user.is_stored, user.lost_home = True, False
            self._come_later(user)

        self._at(ends_s - self._now_s, end)

    def _restored_at(self, engine: SimulatedEngine, found: Reuse) -> float:
        """Say when what was found is live; a restore that takes too long becomes a miss."""
        if not found.nbytes:
            return self._now_s
        speeds, deadline_s = self._conditions.speeds, self._conditions.restore_deadline_s
        nbytes = sum(found.nbytes.values())
        at = self._now_s + found.nbytes.get("disk", 0) / speeds.disk_bytes_s
        shared = found.nbytes.get("redis", 0)
        if shared:
            at = max(at, self.link.done_at(self._now_s, shared))
        at = max(at, engine.restore_free_at) + nbytes / speeds.unpack_bytes_s
        if at - self._now_s > deadline_s:
            found.source, found.tokens, found.nbytes = "miss", 0, {}
            return self._now_s + deadline_s
        if shared:
            self.link.read(self._now_s, shared)
        engine.restore_free_at = at
        return at

    # ---- a machine is lost

    def _lose_first(self) -> None:
        self.lost_at_s = self._now_s
        for fleet in self._fleets:
            fleet.engines[0].end()
            name = fleet.replicas[0].name
            self._at(AWAY_S, fleet.engines[0].start)
            for user in self._users:
                if user.fleet is fleet and fleet.homes.get(user.session) == name:
                    user.lost_home = user.is_stored
