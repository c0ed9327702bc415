"""The KV events that readers get, from the reports of the ranks."""

from __future__ import annotations

import random
import struct
from collections import Counter

import pytest

from engines.vllm_plugin.inventory import (
    CPU,
    MEDIA,
    STORAGE,
    BlocksStored,
    Change,
    Inventory,
)
from engines.vllm_plugin.messages import BlockRuns, RankRests
from tests.block_sessions import BLOCK, hashes, ref, tokens_of

CHAIN = hashes(tokens_of(10))
OTHER = hashes([*tokens_of(5), *tokens_of(5, first=500)])  # five of them, and five others
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
    chain: list[bytes],
    ram: BlockRuns = (),
    storage: BlockRuns = (),
    *,
    session: str = "s",
    ids: bytes = b"",
    rank: int = 0,
) -> RankRests:
    return RankRests(rank, ref(session), b"".join(chain), ids, ram, storage)


def test_a_saved_session_is_stored_once_with_its_tokens_and_parents():
    inventory, reader = Inventory(1, BLOCK), Reader()
    inventory.update(rests(CHAIN[:6], ((0, 6),), ids=IDS[: 6 * BLOCK * 4]))
    assert inventory.has_news
    assert not inventory.is_reported(("t", "s"))
    (stored,) = reader.read(inventory.take())
    assert (stored.medium, stored.hashes, stored.parent) == (CPU, CHAIN[:6], None)
    assert list(stored.ids) == tokens_of(6)
    assert inventory.is_reported(("t", "s"))
    assert not inventory.has_news
    assert inventory.take() == []
    # The next turn: only the new blocks, after the known ones. The record of its ids ends earlier.
    inventory.update(rests(CHAIN, ((0, 10),), ((0, 6),), ids=IDS[: 8 * BLOCK * 4]))
    known, unknown, disk = reader.read(inventory.take())
    assert (known.hashes, known.parent) == (CHAIN[6:8], CHAIN[5])
    assert list(known.ids) == tokens_of(2, first=6 * BLOCK)
    assert (unknown.hashes, unknown.parent, list(unknown.ids)) == (CHAIN[8:], CHAIN[7], [])
    assert (disk.medium, disk.hashes) == (STORAGE, CHAIN[:6])


def test_a_block_leaves_with_the_last_session_that_has_it():
    inventory, reader = Inventory(1, BLOCK), Reader()
    inventory.update(rests(CHAIN, ((0, 10),)))
    inventory.update(rests(OTHER, ((0, 10),), session="u"))
    reader.read(inventory.take())
    assert reader.blocks(CPU) == {*CHAIN, *OTHER}
    inventory.update(rests([], session="s"))
    reader.read(inventory.take())
    assert reader.blocks(CPU) == {*OTHER}
    inventory.update(rests([], session="u"))
    reader.read(inventory.take())
    assert not reader.blocks(CPU)
    assert len(inventory) == 0


def test_a_session_that_moves_is_reported_where_it_is_before_where_it_is_not():
    inventory, reader = Inventory(1, BLOCK), Reader()
    inventory.update(rests(CHAIN, ((0, 10),)))
    reader.read(inventory.take())
    inventory.update(rests(CHAIN, (), ((0, 10),)))
    taken = []
    while inventory.has_news:  # few at a time: nothing is removed before all is stored
        new = reader.read(inventory.take(3))
        taken += new
        assert reader.blocks(CPU) | reader.blocks(STORAGE) == {*CHAIN}
    assert [type(x).__name__ for x in taken[:4]] == ["BlocksStored"] * 4
    assert (reader.blocks(CPU), reader.blocks(STORAGE)) == (set(), {*CHAIN})


def test_unread_changes_leave_no_trace():
    inventory = Inventory(1, BLOCK)
    for _ in range(1000):
        inventory.update(rests(CHAIN, ((0, 10),)))
        inventory.update(rests([]))
    while inventory.has_news:
        assert inventory.take() == []


def test_after_a_clear_everything_is_reported_again():
    inventory = Inventory(1, BLOCK)
    inventory.update(rests(CHAIN, ((0, 10),), ((0, 4),), ids=IDS))
    inventory.update(rests(OTHER, ((0, 10),), session="u"))
    inventory.take()
    inventory.update(rests([], session="u"))  # readers need not hear of it any more
    inventory.report_again()
    reader = Reader()
    reader.read(inventory.take())
    assert (reader.blocks(CPU), reader.blocks(STORAGE)) == ({*CHAIN}, {*CHAIN[:4]})
    assert not inventory.has_news


def test_of_several_ranks_a_block_counts_that_all_have():
    inventory, reader = Inventory(2, BLOCK), Reader()
    inventory.update(rests(CHAIN, ((0, 10),), rank=0))
    assert inventory.take() == []
    inventory.update(rests(CHAIN[:8], ((0, 2), (4, 8)), rank=1))
    reader.read(inventory.take())
    assert reader.blocks(CPU) == {*CHAIN[:2], *CHAIN[4:8]}
    inventory.update(rests([], rank=1))
    reader.read(inventory.take())
    assert not reader.blocks(CPU)
    inventory.update(rests([], rank=0))
    assert len(inventory) == 0


def test_the_inventory_is_bounded_and_the_newest_sessions_stay(caplog):
    inventory, reader = Inventory(1, BLOCK, max_blocks=30), Reader()
    chains = [hashes(tokens_of(10, first=i * 1000)) for i in range(8)]
    for i, chain in enumerate(chains):
        inventory.update(rests(chain, ((0, 10),), session=f"s{i}"))
        reader.read(inventory.take())
    assert reader.blocks(CPU) == {h for chain in chains[5:] for h in chain}
    assert len(inventory) == 30
    assert caplog.text.count("the newest sessions") == 1


def test_a_left_out_session_is_kept_of_no_rank_and_comes_back_when_all_report_it():
    inventory, reader = Inventory(2, BLOCK, max_blocks=30), Reader()
    chains = [hashes(tokens_of(10, first=i * 1000)) for i in range(8)]
    for i, chain in enumerate(chains):
        for rank in range(2):
            inventory.update(rests(chain, ((0, 10),), session=f"s{i}", rank=rank))
        reader.read(inventory.take())
    assert len(inventory._shares) == 3
    inventory.update(rests(chains[0], ((0, 10),), session="s0", rank=0))
    reader.read(inventory.take())
    assert reader.blocks(CPU) == {h for chain in chains[5:] for h in chain}
    inventory.update(rests(chains[0], ((0, 10),), session="s0", rank=1))
    reader.read(inventory.take())
    assert reader.blocks(CPU) == {h for i in (0, 6, 7) for h in chains[i]}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_readers_hold_the_blocks_of_all_ranks_after_any_reports(num_ranks):
    """Against a plain model: sessions with common beginnings that grow, move and go."""
    random_ = random.Random(num_ranks)
    inventory, reader = Inventory(num_ranks, BLOCK), Reader()
    now: dict[tuple[str, int], tuple[list[bytes], BlockRuns, BlockRuns]] = {}
    branches = [hashes(tokens_of(n) + [b] * (10 - n) * BLOCK) for n in (0, 3, 7) for b in (1, 2)]

    def runs(size: int) -> BlockRuns:
        cuts = sorted(random_.sample(range(size + 1), min(4, size + 1)))
        return tuple(zip(cuts[::2], cuts[1::2], strict=False))

    for _ in range(600):
        session, rank = random_.choice("abc"), random_.randrange(num_ranks)
        chain = random_.choice(branches)[: random_.randrange(11)]
        share = chain, runs(len(chain)), runs(len(chain))
        now[session, rank] = share
        inventory.update(rests(*share, session=session, rank=rank))
        if random_.random() < 0.3:
            reader.read(inventory.take(random_.randrange(1, 9)))
        if random_.random() < 0.02:
            inventory.report_again()
            reader = Reader()
    while inventory.has_news:
        reader.read(inventory.take(3))
    for i, medium in enumerate(MEDIA, 1):
        wanted = set()
        for session in "abc":
            shares = [now.get((session, rank), ([], (), ())) for rank in range(num_ranks)]
            wanted |= set.intersection(
                *({h for a, b in share[i] for h in share[0][a:b]} for share in shares)
            )
        assert reader.blocks(medium) == wanted
