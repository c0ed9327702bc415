"""Chooses budgets for a number of sessions, or says why there are none and how many would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.capacity.needs import MIB, Needs
from launch.capacity.rooms import Rooms
from launch.settings.units import show_bytes

HOT_SHARE = 0.5  # of the memory for KV: sleepers leave live KV as much, where it is needed
# Above high water sessions are put to sleep, so that "so many hot" needs somewhat more than these.
HEADROOM = 1.2


@dataclass(frozen=True)
class Budgets:
    """The chosen bytes, and how many sessions each tier holds then."""

    hot: int
    ram: int
    disk: int
    num_hot: int  # at once, while one of them is answered
    num_held: dict[str, int]  # asleep, by tier
    num_at_first: int = 0  # that come back as long as the model was not measured

    @property
    def most(self) -> int:
        """Sessions that come back, whichever tier they sleep in."""
        return max(self.num_held.values(), default=0)


def choose_budgets(needs: Needs, rooms: Rooms, num_sessions: int) -> Budgets:
    """The budgets that suit ``num_sessions`` best; ``most`` may be fewer than these."""
    hot, ram = _memory(needs, rooms, num_sessions)
    disk = rooms.given_disk
    if disk is None:  # where it can, it holds all of them before the model was measured, too
        wanted = max(needs.cold_bytes("disk", num_sessions, meanwhile=x) for x in (False, True))
        disk = min(wanted, _whole(rooms.disk))
    budgets = {"ram": ram, "disk": disk, "redis": rooms.redis}
    held = {
        tier: needs.num_asleep(tier, nbytes)
        for tier, nbytes in budgets.items()
        if nbytes and tier in needs.asleep
    }
    at_first = [needs.num_asleep(tier, budgets[tier], meanwhile=True) for tier in held]
    return Budgets(hot, ram, disk, needs.num_hot(hot), held, max(at_first, default=0))


def _memory(needs: Needs, rooms: Rooms, num_sessions: int) -> tuple[int, int]:
    """Share memory out: one session has to run; then sleepers in memory; the rest is live KV."""
    all_hot = _up(int(needs.hot_bytes(num_sessions) * HEADROOM))
    awake = int(needs.hot_bytes(min(num_sessions, rooms.awake)) * HEADROOM)
    floor = _up(max(needs.running_bytes, min(awake, int(rooms.shared * HOT_SHARE), rooms.hot)))
    ram = rooms.given_ram
    if ram is None:
        left = rooms.ram if rooms.given_hot is not None else min(rooms.ram, rooms.shared - floor)
        ram = min(needs.cold_bytes("ram", num_sessions), _whole(left))
    hot = rooms.given_hot
    if hot is None:
        hot = min(all_hot, _whole(min(rooms.hot, max(floor, rooms.shared - ram))))
    return hot, max(0, ram)


def refusal(needs: Needs, rooms: Rooms, num_sessions: int) -> str:
    """The reason why so many sessions cannot be kept, in words with figures; "" if they can."""
    found = choose_budgets(needs, rooms, num_sessions)
    if found.hot < needs.running_bytes:
        return (
            f"one session of {needs.context} tokens takes {show_bytes(needs.running_bytes)} of live"
            f" KV while it is answered, and {show_bytes(found.hot)} may be used"
        )
    if found.most >= num_sessions:
        return ""
    parts = [
        f"{show_bytes(needs.cold_bytes(tier, num_sessions))} of {tier} ({needs.asleep[tier].codec};"
        f" {show_bytes(_budget(found, rooms, tier))} may be used)"
        for tier in found.num_held
    ]
    return "asleep they take " + " or ".join(parts or ["a tier, and there is none"])


def what_would(
    needs_at: Callable[[int], Needs], rooms: Rooms, num_sessions: int, context: int
) -> list[str]:
    """List what this machine could do instead, nearest to the wish first."""
    found = choose_budgets(needs_at(context), rooms, num_sessions)
    ways = []
    if found.hot >= needs_at(context).running_bytes and found.most:
        ways.append(f"--sessions {found.most} --context {context}")
    shorter = _longest(needs_at, rooms, num_sessions, context)
    if shorter:
        ways.append(f"--sessions {num_sessions} --context {shorter}")
    if found.hot < needs_at(context).running_bytes:
        ways.append(f"--hot {_size(needs_at(context).running_bytes)}, where that is free")
    elif rooms.given_disk is not None and rooms.given_disk < rooms.disk:
        ways.append(f"--disk {_size(needs_at(context).cold_bytes('disk', num_sessions))}")
    else:
        wanted = needs_at(context).cold_bytes("disk", num_sessions)
        ways.append(f"--disk {_size(wanted)} in a folder with room for it (store.disk_path)")
    return ways


def _longest(
    needs_at: Callable[[int], Needs], rooms: Rooms, num_sessions: int, context: int
) -> int:
    """The most tokens, in steps of 64, that so many sessions may have; 0 = not even the fewest."""
    low, high = 0, context // 64
    while low < high:
        middle = (low + high + 1) // 2
        fits = not refusal(needs_at(middle * 64), rooms, num_sessions)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * 64


def _budget(found: Budgets, rooms: Rooms, tier: str) -> int:
    return {"ram": found.ram, "disk": found.disk, "redis": rooms.redis}[tier]


def _size(nbytes: int) -> str:
    return f"{-(-nbytes // MIB)}MiB" if nbytes < 10 << 30 else f"{-(-nbytes // (1 << 30))}GiB"


def _whole(nbytes: int) -> int:
    return max(0, nbytes // MIB * MIB)


def _up(nbytes: int) -> int:
    return -(-nbytes // MIB) * MIB
