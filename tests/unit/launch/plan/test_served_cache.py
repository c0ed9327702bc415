"""The cache that the chosen engine keeps of a model depends on the machine, too."""

from __future__ import annotations

import dataclasses

import pytest

from launch.families.cache_shape import ModelRefused
from launch.machine.processor import has_matrix_tiles
from launch.plan.served_cache import served_cache
from tests.unit.launch.plan.published import DEEPSEEK_V3
from tests.unit.launch.plan.test_serve_checks import served_settings


def test_vllm_keeps_latents_on_gpus_and_on_processors_with_matrix_tiles(tmp_path):
    on_vllm = {"engine__hot_codec": "", "engine__kind": "vllm"}
    effective = served_settings(tmp_path, DEEPSEEK_V3, on_vllm)
    on_gpu = dataclasses.replace(effective, widens=False)
    assert served_cache(on_gpu, DEEPSEEK_V3).has_latents
    on_cpu = dataclasses.replace(effective, widens=True)
    if has_matrix_tiles():
        assert served_cache(on_cpu, DEEPSEEK_V3).has_latents
    else:
        with pytest.raises(ModelRefused, match="no prefixes of models with latents"):
            served_cache(on_cpu, DEEPSEEK_V3)


@pytest.mark.parametrize(("flags", "found"), [("fma amx_tile avx", True), ("fma avx", False)])
def test_matrix_tiles_are_read_off_the_flags(tmp_path, flags, found):
    about = tmp_path / "cpuinfo"
    about.write_text(f"flags\t\t: {flags}\n")
    assert has_matrix_tiles(about) is found
    assert not has_matrix_tiles(tmp_path / "none")
