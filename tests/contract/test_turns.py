"""Sessions that take turns on too little room, through both stores and their real tiers."""

from __future__ import annotations

from functools import partial

import pytest

from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.clock import Clock
from tests.contract.store_rig import history, ref, session_bytes

ROOM = 19  # sessions
ROUNDS = 6
TOKENS = 64  # four chunks, and a prompt of one token more that is computed
OTHER = history(4, 99)


@pytest.mark.parametrize(("sessions", "at_least"), [(24, 16), (38, 12)])
@pytest.mark.parametrize("kind", ["ram", "disk", "ram over disk"])
def test_sessions_in_turn_come_back(rig, tmp_path, kind, sessions, at_least):
    """By order of last use none of them would: each went just before its turn."""
    clock = Clock()
    ram = session_bytes(rig, tokens=history(TOKENS))
    measured = partial(DiskTier, tmp_path / "measured")
    disk = session_bytes(rig, measured, tokens=history(TOKENS))

    def tiers() -> list[Tier]:
        near = [RamTier(ROOM * ram if kind == "ram" else 5 * ram, clock)]
        far = [DiskTier(tmp_path / "cold", ROOM * disk, clock)] if "disk" in kind else []
        return [*(near if "ram" in kind else []), *far]

    store = rig.open(tiers())
    for number in range(ROUNDS):
        back = 0
        for i in range(sessions):
            prompt = [*history(TOKENS, i), *OTHER]
            clock.now += 1.0
            back += rig.back(store, ref(str(i)), prompt).num_tokens == TOKENS
            rig.save(store, ref(str(i)), history(TOKENS, i))
        assert number < 2 or back >= at_least, number
    if kind != "ram":  # what was learned survives a restart
        store.close()
        store = rig.open(tiers())
        found = [rig.back(store, ref(str(i)), history(TOKENS, i)) for i in range(sessions)]
        assert sum(x.num_tokens == TOKENS for x in found) >= at_least
