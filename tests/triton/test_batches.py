"""A few chunks that follow each other: one launch, the same bytes as on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.blocks.blocks import Packing  # noqa: E402
from engines.vllm_plugin.device.kernels.triton_rates import TritonRates  # noqa: E402
from engines.vllm_plugin.device.kernels.triton_rows import TritonRows  # noqa: E402
from tests.triton.rig import are_equal  # noqa: E402
from tests.triton.test_device_blocks import opened  # noqa: E402
from tests.triton.test_rates import rated  # noqa: E402

pytestmark = pytest.mark.triton


def launches_of(kernels: type, place: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the chunks of each launch from now on; ``place``: of the payloads among arguments."""
    launches: list[int] = []

    def counted(launch, *args):
        launches.append(len(args[place]))
        launch(*args)

    for name in ("pack", "unpack"):
        launch = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, launch=launch: counted(launch, *args))
    return launches


def test_rows_of_a_few_chunks_are_packed_and_filled_by_one_launch(rigs, monkeypatch):
    """A damaged one among them fills nothing, and the others are filled."""
    rig = opened(rigs, heads=4, layers=2)
    ids = [7, 2, 10, 4, 5, 0, 1, 11, 8, 6, 3, 9]
    launches = launches_of(TritonRows, 5, monkeypatch)
    blobs = rig.blobs(rig.device, ids)
    assert launches == [1, 3, 2]  # the first chunk has another layout; a batch holds up to four
    assert blobs == rig.blobs(rig.host, ids)
    wanted = rig.fillings(blobs, ids)
    for broken in (None, 3):
        if broken is not None:
            damaged = bytearray(blobs[broken])
            damaged[-1] ^= 1
            wanted[broken] = replace(wanted[broken], blob=damaged)
        launches.clear()
        done, found = rig.filled(rig.device, wanted)
        assert done == set(ids) - (set() if broken is None else set(wanted[broken].block_ids))
        assert launches == ([1, 3, 2] if broken is None else [1, 1, 1, 2])
        _, right = rig.filled(rig.host, wanted)
        assert are_equal(found, right)


def test_batches_begin_at_the_same_chunks_in_every_session(rigs):
    rig = opened(rigs, heads=4, layers=2)
    pieces = rig.pieces(100)
    saving = rig.device._saving
    for first in range(1, 40):
        wanted = [Packing(x, [0, 0]) for x in pieces[first:]]
        batches = list(saving.batches(wanted))
        sizes = [len(x.blobs) for x in batches]
        assert sum(sizes) == len(wanted)
        assert [x.first for x in batches] == [16 * sum(sizes[:i]) for i in range(len(sizes))]
        starts = {x.blobs[0].piece.first_token // 16 for x in batches[1:]}
        assert all(x % max(sizes) == 0 for x in starts)
    gap = [*pieces[1:3], *pieces[4:6]]
    sizes = [len(x.blobs) for x in saving.batches([Packing(x, [0, 0]) for x in gap])]
    assert sizes == [2, 2]


FIRST_APART = pytest.param({"heads": 4, "layers": 2}, marks=pytest.mark.thorough)


@pytest.mark.parametrize("changes", [{}, FIRST_APART, {"block": 20}])
def test_a_few_chunks_of_a_fixed_rate_are_packed_and_filled_by_one_launch(changes, monkeypatch):
    rig = rated(**changes)
    ids = [7, 2, 10, 4, 5, 0, 1, 11, 8, 6, 3, 9]
    launches = launches_of(TritonRates, 2, monkeypatch)
    blobs = rig.blobs(rig.device, ids)
    assert launches[-2:] == [3, 2]
    assert blobs == rig.blobs(rig.host, ids)
    found, right = (rig.restored(x, blobs, ids) for x in (rig.device, rig.host))
    assert are_equal(found, right)
    assert launches[-2:] == [3, 2]
