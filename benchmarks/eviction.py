"""Compares the eviction order of the tiers with order of last use and with Belady's limit.

    python benchmarks/eviction.py                  ten traces at five sizes, and sessions in turn
    python benchmarks/eviction.py --seeds 101 102  other seeds of the traces, too

A store bounded in bytes is simulated: chains of chunks, a restore of the longest held beginning,
eviction from a chain's end. The *working set* is the most that an oracle ever needs to hold; rooms
are shares of it. Printed is the share of reusable tokens that were not computed again. It fails if
the order keeps 1.5 points less than order of last use anywhere, or brings back too few of the
sessions that take turns. The last lines time one turn of a session of 142,000 tokens.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.eviction_traces import TRACES, Trace, in_turn
from kvstore.tiers.return_order import ReturnOrder, stated_size

SHARES: Final = (0.25, 0.5, 0.8, 1.0, 1.25)
MOST_BELOW: Final = 1.5  # points below order of last use
IN_TURN: Final = ((21, 16), (24, 16), (38, 12), (76, 12))  # sessions on room for 19: at least back
Chain = list[tuple[int, int]]


class Streams:
    """Chains by stream; only the end of a stream that no other one continues can go."""

    def __init__(self, trace: Trace, room: int) -> None:
        self.room, self.used = room, 0
        self.held: dict[int, int] = {}
        self.following: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self.before: dict[int, int] = {}
        self.chains = [turn.chain for turn in trace.turns]

    def found(self, number: int) -> int:
        """Return how many units of a turn's chain are held from its beginning on."""
        total = 0
        for stream, units in self.chains[number]:
            have = min(units, self.held.get(stream, 0))
            total += have
            if have < units:
                break
        return total

    def grow(self, chain: Chain, i: int) -> None:
        """Take in one more unit of the chain's stream number ``i``."""
        stream = chain[i][0]
        if stream not in self.held:
            self.held[stream] = 0
            if i:
                self.before[stream] = chain[i - 1][0]
                self.following[chain[i - 1][0]][stream] = None
        self.held[stream] += 1
        self.used += 1

    def shrink(self, stream: int) -> int | None:
        """Drop the end of a stream; return the one before it if that can go now."""
        self.held[stream] -= 1
        self.used -= 1
        if self.held[stream]:
            return None
        del self.held[stream]
        before = self.before.pop(stream, None)
        if before is not None:
            del self.following[before][stream]
        return before


class LastUse(Streams):
    """Order of last use, by the unit; a chain's first unit is its most recent."""

    def __init__(self, trace: Trace, room: int) -> None:
        super().__init__(trace, room)
        self.order: OrderedDict[tuple[int, int], None] = OrderedDict()

    def turn(self, number: int) -> None:
        """Use a turn's chain and take in its new units, as far as there is room."""
        chain = self.chains[number]
        own = {stream for stream, _ in chain}
        for stream, units in chain:
            for i in range(min(units, self.held.get(stream, 0))):
                self.order.move_to_end((stream, i))
        for i, (stream, units) in enumerate(chain):
            for position in range(self.held.get(stream, 0), units):
                while self.used >= self.room:
                    leaf = next(iter(self.order))[0]
                    while self.following.get(leaf):
                        leaf = next(iter(self.following[leaf]))
                    if leaf in own:
                        return
                    del self.order[leaf, self.held[leaf] - 1]
                    self.shrink(leaf)
                self.grow(chain, i)
                self.order[stream, position] = None


class Limit(Streams):
    """Belady's limit: evicts what is needed last, or does not let it in."""

    def __init__(self, trace: Trace, room: int) -> None:
        super().__init__(trace, room)
        self.uses: defaultdict[int, list[int]] = defaultdict(list)
        for i in range(len(self.chains) - 1, -1, -1):
            for stream, _ in self.chains[i]:
                self.uses[stream].append(i)
        self.heap: list[tuple[int, int]] = []

    def next_use(self, stream: int) -> int:
        """Return the number of the next turn that needs a stream."""
        return self.uses[stream][-1] if self.uses[stream] else 1 << 30

    def last_needed(self) -> int:
        """Return the stream that can go and is needed last."""
        while True:
            at, stream = self.heap[0]
            can_go = stream in self.held and not self.following.get(stream)
            if can_go and -at == self.next_use(stream):
                return stream
            heapq.heappop(self.heap)

    def turn(self, number: int) -> None:
        """Use a turn's chain and take in those of its units that are worth it."""
        chain = self.chains[number]
        for stream, _ in chain:
            self.uses[stream].pop()
            heapq.heappush(self.heap, (-self.next_use(stream), stream))
        for i, (stream, units) in enumerate(chain):
            for _ in range(self.held.get(stream, 0), units):
                if self.used >= self.room:
                    last = self.last_needed()
                    if self.next_use(last) <= self.next_use(stream) or last == stream:
                        return
                    before = self.shrink(last)
                    if before is not None and not self.following.get(before):
                        heapq.heappush(self.heap, (-self.next_use(before), before))
                self.grow(chain, i)


class Product:
    """The product's order, called as a tier calls it."""

    def __init__(self, trace: Trace, room: int) -> None:
        self.trace, self.now_s = trace, 0.0
        self.order = ReturnOrder(room, lambda: self.now_s, stated_size)

    def keys(self, number: int) -> Iterator[bytes]:
        """Name the units of a turn's chain."""
        for stream, units in self.trace.turns[number].chain:
            yield from (b"c%d %d" % (stream, i) for i in range(units))

    def found(self, number: int) -> int:
        """Return how many units of a turn's chain are held from its beginning on."""
        count = 0
        for key in self.keys(number):
            if key not in self.order:
                break
            count += 1
        return count

    def turn(self, number: int) -> None:
        """Restore what is held of a turn's chain, and save it."""
        self.now_s = self.trace.turns[number].at_s
        keys, num = list(self.keys(number)), self.found(number)
        self.order.touch(keys[:num])
        self.order.add(dict.fromkeys(keys[num:], 1), after=keys[num - 1] if num else b"")
        self.order.touch(keys, restored=False)


STORES: Final[dict[str, type[LastUse] | type[Limit] | type[Product]]] = {
    "last use": LastUse,
    "product": Product,
    "limit": Limit,
}


def kept(trace: Trace, name: str, room: int) -> tuple[float, float]:
    """Return the share of reusable units that were held, and that of returns that were whole."""
    store = STORES[name](trace, room)
    seen: dict[int, int] = {}
    reused = reusable = whole = returns = 0
    for number, turn in enumerate(trace.turns):
        held, before = store.found(number), 0
        for stream, units in turn.chain:
            have = min(units, seen.get(stream, 0))
            before += have
            if have < units:
                break
        for stream, units in turn.chain:
            seen[stream] = max(units, seen.get(stream, 0))
        reused, reusable = reused + min(held, before), reusable + before
        whole, returns = whole + (held >= before > 0), returns + (before > 0)
        store.turn(number)
    return reused / reusable, whole / returns


def compare(seeds: list[int]) -> list[str]:
    """Print all traces at all sizes; return the cells that are too far below."""
    failures = []
    above: list[float] = []
    print(f"{'reused tokens, %':26} {'last use':>9} {'product':>9} {'limit':>9} {'above':>7}")
    for make in TRACES:
        for trace in (make(), *(make(seed) for seed in seeds)):
            size = trace.working_set()
            for share in SHARES:
                room = max(1, int(size * share))
                row = [100 * kept(trace, name, room)[0] for name in STORES]
                above.append(row[1] - row[0])
                cell = f"{trace.name} at {share:.0%}"
                print(f"{cell:26} {row[0]:9.1f} {row[1]:9.1f} {row[2]:9.1f} {above[-1]:+7.1f}")
                if above[-1] < -MOST_BELOW:
                    failures.append(f"{cell}: {above[-1]:+.2f}")
    print(f"above order of last use: mean {sum(above) / len(above):+.2f}, worst {min(above):+.2f}")
    return failures


def take_turns() -> list[str]:
    """Print how many of N equal sessions come back a round on room for 19."""
    failures = []
    for num, at_least in IN_TURN:
        trace = in_turn(num)
        back = {name: num * kept(trace, name, 19 * trace.units(4096))[1] for name in STORES}
        each = ", ".join(f"{name} {x:.1f}" for name, x in back.items())
        print(f"{num} in turn on room for 19: {each}")
        if back["product"] < at_least:
            failures.append(f"{num} in turn: {back['product']:.1f} of at least {at_least}")
    return failures


def time_a_turn() -> None:
    """Print the median time of a turn's bookkeeping: 4,437 chunks are there, 16 are new."""
    order = ReturnOrder(26 * 4453, time.monotonic, stated_size)
    chains = [[b"c%d %d" % (c, i) for i in range(4453)] for c in range(24)]
    for chain in chains:
        order.add(dict.fromkeys(chain[:4437], 1))
    spent = []
    for chain in chains:
        started = time.perf_counter()
        order.touch(chain[:4437])
        order.add(dict.fromkeys(chain[4437:], 1), after=chain[4436])
        order.touch(chain, restored=False)
        spent.append(1e6 * (time.perf_counter() - started))
    print(f"a turn of a chain of 4,453 chunks, 16 of them new: {sorted(spent)[12]:.0f} us")


def main() -> None:
    """Compare, and exit with 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="of more traces")
    failures = [*take_turns(), *compare(parser.parse_args().seeds)]
    time_a_turn()
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()
