from __future__ import annotations

from launch.machine.memory import available_memory, free_disk
from launch.settings.default_budgets import DISK_MOST, SMALLEST, default_budgets, weights_bytes

GIB = 1 << 30


def values(available, weights, disk_free=1 << 40):
    return {
        name: value.value for name, value in default_budgets(available, weights, disk_free).items()
    }


def test_weights_come_first_and_half_of_the_rest_stays_free():
    found = values(32 * GIB, 16 * GIB)
    hot, ram = found["engine.hot_bytes"], found["store.ram_bytes"]
    assert 5 * GIB < hot < 6 * GIB
    assert hot + ram <= 8 * GIB


def test_unknown_weights_are_taken_for_half():
    assert values(32 * GIB, None) == values(32 * GIB, 16 * GIB)


def test_a_model_that_does_not_fit_leaves_the_smallest_budgets():
    found = values(8 * GIB, 16 * GIB)
    assert found["engine.hot_bytes"] == found["store.ram_bytes"] == SMALLEST


def test_the_disk_is_never_filled():
    assert values(GIB, 0, disk_free=GIB)["store.disk_bytes"] == GIB // 2
    assert values(GIB, 0)["store.disk_bytes"] == DISK_MOST
    assert values(GIB, 0, disk_free=7 << 20)["store.disk_bytes"] == 0  # too little for the tier


def test_the_reason_is_given():
    reasons = {
        name: value.origin for name, value in default_budgets(32 * GIB, 2 * GIB, GIB).items()
    }
    assert reasons["engine.hot_bytes"] == (
        "derived: 35% of 32 GiB of memory available, beside 2 GiB of weights"
    )


def test_weights_are_counted_from_the_files(tmp_path):
    (tmp_path / "model-1.safetensors").write_bytes(bytes(300))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(200))
    (tmp_path / "tokenizer.json").write_bytes(bytes(9000))
    assert weights_bytes(tmp_path, widened=False) == 500
    assert weights_bytes(tmp_path, widened=True) == 1000
    assert weights_bytes(tmp_path / "nowhere", widened=True) is None


def test_a_containers_limit_counts(tmp_path):
    unlimited = available_memory(tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory(tmp_path) == 600000 < unlimited
    (tmp_path / "memory.current").write_text("2000000\n")
    assert available_memory(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 600000


def test_free_space_of_a_folder_to_be(tmp_path):
    assert abs(free_disk(tmp_path / "a" / "b") - free_disk(tmp_path)) < GIB


def test_a_gpu_with_its_own_memory_holds_weights_and_live_kv():
    found = default_budgets(64 * GIB, 16 * GIB, GIB, gpu_bytes=80 * GIB)
    assert found["engine.hot_bytes"].value == int(64 * 0.8 * 1024) << 20
    assert found["engine.hot_bytes"].origin == (
        "derived: 80% of 80 GiB on the GPU, beside 16 GiB of weights"
    )
    assert 22 * GIB < found["store.ram_bytes"].value < 23 * GIB
