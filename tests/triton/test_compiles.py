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
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engines.vllm_plugin.device.kernels import row_kernels

POINTERS = {"cache": "*i16", "sides": "*i64", "blocks": "*i64", "payload": "*u8",
            "payload16": "*i16", "offsets": "*i64", "signs": "*fp32", "bounds": "*fp32",
            "levels": "*fp32", "unit": "*fp32", "squares": "*i32", "out": "*i16",
            "source": "*i16"}
STRIDES = {"s_block", "s_head", "s_token"}
capability, dim, bits, fp16 = map(int, sys.argv[1:])
found = {}
for name in ("pack_kernel", "unpack_kernel", "gather_kernel", "scatter_kernel"):
    kernel = getattr(row_kernels, name)
    names = kernel.arg_names
    copies = "W" in names
    constants = {"R": 16, "W": dim} if copies else {"R": 16, "D": dim, "BITS": bits, "FP16": fp16}
    constants |= {"SIZE": 2048} if name == "pack_kernel" else {}
    kinds = {n: POINTERS.get(n, "i64" if n in STRIDES else "i32") for n in names}
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    divisible = POINTERS.keys() | STRIDES | {"D"} - constants.keys()
    aligned = [i for i, n in enumerate(names) if n in divisible]
    hints = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = built.asm["ptx"]
    found[name] = {
        "cubin": len(built.asm["cubin"]),
        "local": ".local" in ptx,
        "fused": ptx.count("fma.rn.f32"),
        "wide": ptx.count("ld.global.v4.b32") + ptx.count("ld.global.v2.b64"),
    }
print(json.dumps(found))
"""


KINDS = [(64, 3, 0), (128, 3, 0), (256, 3, 0), (128, 4, 1)]


@pytest.mark.parametrize(("dim", "bits", "fp16"), KINDS)
@pytest.mark.parametrize("capability", [90, 121])
def test_compiles_without_fusing_or_spilling(capability, dim, bits, fp16, tmp_path):
    env = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": "."}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, (capability, dim, bits, fp16))],
        capture_output=True,
        text=True,
        env=env,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == 4
    assert found["pack_kernel"]["wide"] > 0, "rows are not read 16 bytes at a time"
    for kernel in found.values():
        assert kernel["cubin"] > 0
        assert not kernel["local"], "registers spill to local memory"
        assert kernel["fused"] == 0, "a fused multiply-add would change the last bit"
