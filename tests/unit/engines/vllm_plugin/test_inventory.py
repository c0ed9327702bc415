"""The KV events that readers get, from the reports of the ranks."""

from __future__ import annotations

import random
import struct
from collections import Counter

from engines.vllm_plugin.inventory import (
    CPU,
    MEDIA,
    STORAGE,
    BlocksStored,
    Change,
    Inventory,
)
from engines.vllm_plugin.messages import RankRests
from tests.block_sessions import BLOCK, hashes, ref, tokens_of

CHAIN = hashes(tokens_of(10))
IDS = struct.pack(f"<{10 * BLOCK}I", *tokens_of(10))


class Reader:
    """Counts as llm-d's reader does, and holds that nothing comes twice."""

    def __init__(self) -> None:
        self.held: dict[str, Counter[bytes]] = {x: Counter() for x in MEDIA}
        self.parents: dict[bytes, bytes | None] = {}

    def read(self, changes: list[Change]) -> list[Change]:
        for change in changes:
            held = self.held[change.medium]
            if isinstance(change, BlocksStored):
                assert not held.keys() & set(change.hashes), "it was reported before"
                held.update(change.hashes)
                self.parents |= zip(change.hashes, [change.parent, *change.hashes], strict=False)
            else:
                assert set(change.hashes) <= held.keys(), "it was never reported"
                for block_hash in change.hashes:
                    del held[block_hash]
        return changes

    def blocks(self, medium: str) -> set[bytes]:
        return set(self.held[medium])


def rests(
    chain: list[bytes], ram: int = 0, storage: int = 0, *, session: str = "s", ids: bytes = b""
) -> RankRests:
    return RankRests(ref(session), b"".join(chain), ids, ram, storage)


def test_a_saved_session_is_stored_once_with_its_tokens_and_parents():
    inventory, reader = Inventory(BLOCK), Reader()
    inventory.update(rests(CHAIN[:6], 6, ids=IDS[: 6 * BLOCK * 4]))
    assert inventory.has_news
    assert not inventory.is_reported(("t", "s"))
    (stored,) = reader.read(inventory.take())
    assert (stored.medium, stored.hashes, stored.parent) == (CPU, CHAIN[:6], None)
    assert list(stored.ids) == tokens_of(6)
    assert inventory.is_reported(("t", "s"))
    assert not inventory.has_news
    assert inventory.take() == []
    # The next turn: only the new blocks, after the known ones.
    inventory.update(rests(CHAIN, 10, 6, ids=IDS))
    new, disk = reader.read(inventory.take())
    assert (new.hashes, new.parent) == (CHAIN[6:], CHAIN[5])
    assert list(new.ids) == tokens_of(4, first=6 * BLOCK)
    assert (disk.medium, disk.hashes, list(disk.ids)) == (STORAGE, CHAIN[:6], tokens_of(6))


def test_a_session_that_moves_is_reported_where_it_is_before_where_it_is_not():
    inventory, reader = Inventory(BLOCK), Reader()
    inventory.update(rests(CHAIN, 10))
    reader.read(inventory.take())
    inventory.update(rests(CHAIN, 0, 10))
    taken = []
    while inventory.has_news:  # few at a time: nothing is removed before all is stored
        new = reader.read(inventory.take(3))
        taken += new
        assert reader.blocks(CPU) | reader.blocks(STORAGE) == {*CHAIN}
    assert [type(x).__name__ for x in taken[:4]] == ["BlocksStored"] * 4
    assert (reader.blocks(CPU), reader.blocks(STORAGE)) == (set(), {*CHAIN})


def test_unread_changes_leave_no_trace():
    inventory = Inventory(BLOCK)
    for _ in range(1000):
        inventory.update(rests(CHAIN, 10))
        inventory.update(rests([]))
    while inventory.has_news:
        assert inventory.take() == []


def test_the_inventory_is_bounded_and_the_newest_sessions_stay(caplog):
    inventory, reader = Inventory(BLOCK, max_blocks=30), Reader()
    chains = [hashes(tokens_of(10, first=i * 1000)) for i in range(8)]
    for i, chain in enumerate(chains):
        inventory.update(rests(chain, 10, session=f"s{i}"))
        reader.read(inventory.take())
    assert reader.blocks(CPU) == {h for chain in chains[5:] for h in chain}
    assert len(inventory) == 30
    assert caplog.text.count("the newest sessions") == 1
    inventory.update(rests(chains[0], 10, session="s0"))  # one that was left out is reported again
    reader.read(inventory.take())
    assert reader.blocks(CPU) == {h for i in (0, 6, 7) for h in chains[i]}


def test_readers_hold_all_blocks_after_any_reports():
    """Against a plain model: sessions with common beginnings that grow, move and go."""
    random_ = random.Random(1)
    inventory, reader = Inventory(BLOCK), Reader()
    now: dict[str, tuple[list[bytes], int, int]] = {}
    branches = [hashes(tokens_of(n) + [b] * (10 - n) * BLOCK) for n in (0, 3, 7) for b in (1, 2)]
    for _ in range(600):
        session = random_.choice("abc")
        chain = random_.choice(branches)[: random_.randrange(11)]
        now[session] = chain, *(random_.randrange(len(chain) + 1) for _ in MEDIA)
        inventory.update(rests(*now[session], session=session))
        if random_.random() < 0.3:
            reader.read(inventory.take(random_.randrange(1, 9)))
    while inventory.has_news:
        reader.read(inventory.take(3))
    for i, medium in enumerate(MEDIA, 1):
        wanted = {h for held in now.values() for h in held[0][: held[i]]}
        assert reader.blocks(medium) == wanted
    for session in now:
        inventory.update(rests([], session=session))
    reader.read(inventory.take())
    assert len(inventory) == 0 and not reader.blocks(CPU) and not reader.blocks(STORAGE)
