"""The Metal kernels: on Metal itself where there is one, and their text everywhere.

A C++ compiler runs the very body that Metal would compile, with threads as lanes, so that the
arithmetic, the tables and the bit order are proven on any machine that has one.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engines.mlx_worker.cache.packed.metal_packer import (
    MetalRowPacker,
    has_metal_kernel,
    pack_source,
    unpack_source,
)
from engines.mlx_worker.cache.packed.rows import RowKind
from engines.mlx_worker.cache.packed_model import agrees, sample_rows
from kvstore.codecs import floats

pytestmark = pytest.mark.mlx

KINDS = [
    *(RowKind(3, 64, "bfloat16"), RowKind(4, 128, "float16")),
    pytest.param(RowKind(3, 256, "bfloat16"), marks=pytest.mark.thorough),
]
SHIM = Path(__file__).with_name("metal_shim.hpp")
# Metal may contract a product and a sum into one operation; that must not change a byte.
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=fast", "-pthread")


def name(kind: RowKind) -> str:
    return f"{kind.num_bits}-{kind.dim}-{kind.stored}"


@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device")
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_the_kernels_give_the_definitions_bytes_on_metal(kind):
    assert agrees(MetalRowPacker(kind))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_the_kernels_text_gives_the_definitions_bytes(kind, tmp_path):
    stored = sample_rows(kind)[-12:]
    codes, scales = kind.format.pack(floats.widen(stored, kind.stored))
    row_nbytes = kind.format.packed_nbytes(kind.dim)
    main = f"""
        auto rows = read_all<ushort>({stored.size});
        std::vector<uchar> codes({codes.size});
        std::vector<ushort> scales({scales.size});
        each_row({len(stored)}, [&](Position thread_position_in_grid, uint lane_number) {{
            uint thread_index_in_simdgroup = lane_number;
            {pack_source(kind)}
        }});
        write_all(codes);
        write_all(scales);
    """
    out = ran(main, stored.tobytes(), tmp_path)
    got_codes = np.frombuffer(out[: codes.size], np.uint8).reshape(-1, row_nbytes)
    got_scales = np.frombuffer(out[codes.size :], np.uint16)
    whole = scales != 0
    assert 0 < whole.sum() < len(scales)
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_codes[whole], codes[whole])
    # And back again.
    values = floats.narrow(kind.format.unpack(codes, scales, kind.dim), kind.stored)
    right = np.where((scales == 0)[:, None], 0, floats.to_stored(values, kind.stored))
    main = f"""
        auto codes = read_all<uchar>({codes.size});
        auto scales = read_all<ushort>({scales.size});
        std::vector<ushort> rows({stored.size});
        each_row({len(stored)}, [&](Position thread_position_in_grid, uint lane_number) {{
            uint thread_index_in_simdgroup = lane_number;
            {unpack_source(kind)}
        }});
        write_all(rows);
    """
    out = ran(main, codes.tobytes() + scales.tobytes(), tmp_path)
    got = np.frombuffer(out, np.uint16).reshape(right.shape)
    empty = (scales == 0)[:, None]
    np.testing.assert_array_equal(np.where(empty, got & 0x7FFF, got), right)


def ran(main: str, given: bytes, folder: Path) -> bytes:
    source, program = folder / "kernel.cpp", folder / "kernel"
    source.write_text(f'#include "{SHIM}"\nint main() {{{main}}}\n')
    subprocess.run(["g++", *FLAGS, str(source), "-o", str(program)], check=True)
    return subprocess.run([program], input=given, stdout=subprocess.PIPE, check=True).stdout


def test_only_powers_of_two_from_64_have_a_kernel():
    dims = [dim for dim in range(16, 300, 8) if has_metal_kernel(RowKind(3, dim, "bfloat16"))]
    assert dims == [64, 128, 256]
