"""The instructions of an ARM processor that LLVM does not report are found all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

emitter = pytest.importorskip("kvstore.codecs.kernels.emit.emitter", reason="needs numba")
GRACE = "Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp sve\n"
OLDER = "Features\t: fp asimd evtstrm aes crc32 cpuid\n"


@pytest.mark.parametrize(
    ("machine", "name", "cpuinfo", "expected"),
    [
        ("aarch64", "neoverse-v2", GRACE, {"dotprod"}),
        ("aarch64", "cortex-x925", GRACE, {"dotprod"}),
        ("aarch64", "cortex-a72", OLDER, set()),
        ("aarch64", "generic", GRACE, set()),
        ("arm64", "apple-m4", None, {"dotprod"}),
        ("aarch64", "neoverse-v2", None, set()),
        ("x86_64", "znver4", GRACE, set()),
    ],
)
def test_dot_products_of_arm(
    tmp_path: Path, machine: str, name: str, cpuinfo: str | None, expected: set[str]
) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(f"processor\t: 0\n{cpuinfo}CPU part\t: 0xd4f\n")
    assert emitter.features_of_arm(machine, name, path) == expected
