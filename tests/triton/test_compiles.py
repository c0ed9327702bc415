"""The kernels are accepted by the compiler for GPUs that are not here, without spilling.

The interpreter takes code that the compiler rejects, so a build without a GPU needs both.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
pytestmark = pytest.mark.triton

# In a process of its own: with TRITON_INTERPRET set, nothing can be compiled.
SCRIPT = """
import json, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engines.vllm_plugin.device.kernels import rate_kernels, row_kernels

WORDS = "thresholds ends rope_of partners columns lives bits firsts bounds squares first_units"
FLOATS = "query weights signs levels unit angles scratch means sizes gains values rates"
POINTERS = {"sides": "*i64", "blocks": "*i64", "payload": "*u8", "payload16": "*i16",
            "offsets": "*i64", "out": "*i16", "source": "*i16", "encode_high": "*i8",
            "encode_low": "*i8", "decode": "*i8"}
POINTERS |= {x: "*i32" for x in WORDS.split()} | {x: "*fp32" for x in FLOATS.split()}
STRIDES = {"s_block", "s_head", "s_token"}
capability, dim, kind = map(int, sys.argv[1:4])
module = {"rows": row_kernels, "rates": rate_kernels}[sys.argv[4]]
disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
found = {}
for name, constants, num_warps in json.loads(sys.argv[5]):
    kernel = getattr(module, name)
    names = kernel.arg_names
    pointers = POINTERS | {"cache": "*i32" if kind == 2 else "*i16"}
    pointers |= {"bounds": "*fp32"} if module is row_kernels else {}
    pointers |= {"levels": "*u8"} if module is rate_kernels else {}
    kinds = {n: pointers.get(n, "i64" if n in STRIDES else "i32") for n in names}
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    divisible = pointers.keys() | STRIDES | {"D", "half"} - constants.keys()
    aligned = [i for i, n in enumerate(names) if n in divisible]
    hints = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx, cubin = built.asm["ptx"], Path(sys.argv[6]) / f"{name}.cubin"
    cubin.write_bytes(built.asm["cubin"])
    command = [disassembler, "-res-usage", cubin]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found[name] = {
        "spills": "STACK:0 " not in usage or ".local" in ptx,
        "fused": ptx.count("fma.rn.f32"),
        "inexact": ptx.count(".ftz") + ptx.count(".approx") + ptx.count("div.full"),
        "wide": ptx.count("ld.global.v4.b32") + ptx.count("ld.global.v2.b64"),
        "bytes": ptx.count("s32.s8.s8.s32"),
    }
print(json.dumps(found))
"""


def built(capability, dim, kind, family, kernels, tmp_path):
    """What the compiler made of each kernel."""
    env = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": "."}
    numbers = map(str, (capability, dim, kind))
    script = [sys.executable, "-c", SCRIPT, *numbers, family, json.dumps(kernels), str(tmp_path)]
    run = subprocess.run(script, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == len(kernels)
    for kernel in found.values():
        assert not kernel["spills"], "registers spill to local memory"
        assert kernel["fused"] == 0, "a fused multiply-add would change the last bit"
    return found


KINDS = [(64, 3, 0), (128, 3, 0), (256, 3, 0), (128, 4, 1)]
OF_RATES = [(32, 0), (64, 0), (64, 2), (128, 0), (128, 1), (256, 0)]


def targets(kinds, usual):
    """All kinds on a data centre's GPU and on GB10; only some of them without --thorough."""
    return [
        pytest.param(x, *kind, marks=[pytest.mark.thorough] * ((x, *kind) not in usual))
        for x in (90, 121)
        for kind in kinds
    ]


@pytest.mark.parametrize(
    ("capability", "dim", "bits", "fp16"),
    targets(KINDS, [(90, 128, 3, 0), (121, 128, 4, 1)]),
)
def test_kernels_of_rows_compile_without_fusing_or_spilling(capability, dim, bits, fp16, tmp_path):
    rows = {"R": 16, "D": dim, "BITS": bits, "FP16": fp16}
    copies = {"R": 16, "W": dim}
    kernels = [
        ("pack_kernel", rows | {"SIZE": 2048}, 4),
        ("unpack_kernel", rows, 4),
        ("gather_kernel", copies, 4),
        ("scatter_kernel", copies, 4),
    ]
    found = built(capability, dim, fp16, "rows", kernels, tmp_path)
    assert found["pack_kernel"]["wide"] > 0, "rows are not read 16 bytes at a time"


@pytest.mark.parametrize(
    ("capability", "dim", "kind"),
    targets(OF_RATES, [(90, 128, 0), (121, 64, 2)]),
)
def test_kernels_of_rates_multiply_bytes_and_round_as_the_host_does(
    capability, dim, kind, tmp_path
):
    alike = {"T": 32, "D": dim, "K": 32, "KIND": kind}
    packing = {"CB": 32, "SCALE": 512.0, "SHARE": 1 / dim}
    num_warps = 8 if dim > 128 else 4
    kernels = [
        ("pack_rates_kernel", alike | packing, num_warps),
        ("unpack_rates_kernel", alike | {"W": 32}, num_warps),
    ]
    found = built(capability, dim, kind, "rates", kernels, tmp_path)
    for kernel in found.values():
        assert kernel["bytes"] > 0, "products of bytes are not made by tensor cores"
        assert kernel["inexact"] == 0, "denormals or quotients are not those of IEEE"


@pytest.mark.parametrize("capability", [90, 121])
def test_copies_of_fp32_rows_compile(capability, tmp_path):
    copies = {"R": 16, "W": 64}
    kernels = [("gather_kernel", copies, 4), ("scatter_kernel", copies, 4)]
    built(capability, 64, 2, "rows", kernels, tmp_path)
