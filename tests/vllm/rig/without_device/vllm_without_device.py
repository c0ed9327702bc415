"""Names the CPU as the platform of vLLM's CUDA build, which has none where there is no device.

vLLM finds this by the entry point beside it. Command lines are read, configurations made and its
scheduler run as on any platform; no model runs, since that build has no kernels for CPUs.
"""

from __future__ import annotations


def platform() -> str:
    return "vllm.platforms.cpu.CpuPlatform"
