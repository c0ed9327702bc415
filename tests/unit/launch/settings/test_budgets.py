from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cli.options import layers
from launch.errors import UsageError
from launch.machine.resources import free_disk
from launch.settings.budgets import (
    DISK_MOST,
    SMALLEST,
    at_once,
    budget_layers,
    default_budgets,
    weights_bytes,
)
from launch.settings.effective_settings import (
    EffectiveSettings,
    EngineSettings,
    effective_settings,
    replica_settings,
)
from launch.settings.schema import EngineEntry, masked

GIB = 1 << 30
TWO = """
[engine]
max_batch = 3
hot_bytes = "3GiB"
[store]
ram_bytes = "1GiB"
disk_bytes = "4GiB"
[[engines]]
name = "big/one"
kind = "fake"
aliases = ["gpt-4"]
share = 2
[[engines]]
name = "two"
kind = "fake"
load = "on-demand"
unload_after_s = "20m"
max_batch = 5
vllm.block_tokens = 64
"""
ENTRIES = st.lists(
    st.builds(
        lambda load, share: EngineEntry(name="x", load=load, share=share),
        st.sampled_from(["always", "on-demand"]),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=6,
)
REPLICAS = """
[engine]
kind = "fake"
replicas = 3
hot_bytes = "3GiB"
[store]
ram_bytes = "300MiB"
disk_bytes = "3GiB"
"""


def values(available, weights, disk_free=1 << 40):
    return {
        name: value.value for name, value in default_budgets(available, weights, disk_free).items()
    }


def test_weights_come_first_and_half_of_the_rest_stays_free():
    found = values(32 * GIB, 16 * GIB)
    hot, ram = found["engine.hot_bytes"], found["store.ram_bytes"]
    assert 5 * GIB < hot < 6 * GIB
    assert hot + ram <= 8 * GIB


def test_a_model_that_does_not_fit_leaves_the_smallest_budgets():
    found = values(8 * GIB, 16 * GIB)
    assert found["engine.hot_bytes"] == found["store.ram_bytes"] == SMALLEST


def test_the_disk_is_never_filled():
    assert values(GIB, 0, disk_free=GIB)["store.disk_bytes"] == GIB // 2
    assert values(GIB, 0)["store.disk_bytes"] == DISK_MOST
    assert values(GIB, 0, disk_free=7 << 20)["store.disk_bytes"] == 0  # too little for the tier


def test_weights_are_counted_from_the_files(tmp_path):
    (tmp_path / "model-1.safetensors").write_bytes(bytes(300))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(200))
    (tmp_path / "tokenizer.json").write_bytes(bytes(9000))
    assert weights_bytes(tmp_path, widened=False) == 500
    assert weights_bytes(tmp_path, widened=True) == 1000
    assert weights_bytes(tmp_path / "nowhere", widened=True) is None


def test_free_space_of_a_folder_to_be(tmp_path):
    assert abs(free_disk(tmp_path / "a" / "b") - free_disk(tmp_path)) < GIB


def test_a_gpu_with_its_own_memory_holds_weights_and_live_kv():
    found = default_budgets(64 * GIB, 16 * GIB, GIB, gpu_bytes=80 * GIB)
    assert found["engine.hot_bytes"].value == int(64 * 0.8 * 1024) << 20
    assert found["engine.hot_bytes"].origin == (
        "derived: 80% of 80 GiB on the GPU, beside 16 GiB of weights"
    )
    assert 22 * GIB < found["store.ram_bytes"].value < 23 * GIB


def engines_of(toml: str, folder: Path, **options) -> tuple[EngineSettings, ...]:
    (folder / "t.toml").write_text(toml)
    sources = layers({}, config=folder / "t.toml", **options)
    return effective_settings(sources, {"HOME": str(folder)}).engines


def test_each_engine_has_its_entry_over_the_common_settings(tmp_path):
    one, two = engines_of(TWO, tmp_path)
    assert (one.entry.load, two.entry.load, two.entry.unload_after_s) == (
        "always",
        "on-demand",
        1200,
    )
    assert [x.effective.settings.engine.max_batch for x in (one, two)] == [3, 5]
    assert two.effective.settings.engine.vllm.block_tokens == 64
    assert one.effective.settings.engine.served_model_name == "big/one"
    folders = [x.effective.settings.store.disk_path for x in (one, two)]
    assert [Path(x).name for x in folders] == ["big%2Fone", "two"]


def test_the_budgets_are_the_machines_and_divided_by_shares(tmp_path):
    one, two = (x.effective.settings for x in engines_of(TWO, tmp_path))
    gib = 1 << 30
    assert (one.engine.hot_bytes, two.engine.hot_bytes) == (2 * gib, gib)
    assert one.store.ram_bytes + two.store.ram_bytes == gib - 1  # cut down to whole bytes
    assert one.store.disk_bytes + two.store.disk_bytes == 4 * gib - 1


def test_without_tables_there_is_one_engine(tmp_path):
    assert engines_of("[engine]\nkind = 'fake'\n", tmp_path) == ()


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[[engines]]\nkind = 'fake'", "each table needs a name"),
        ("[[engines]]\nname = 'a b'", "'a b' is no name"),
        ("[[engines]]\nname = ''", "need at least one character"),
        ("[[engines]]\nname = 'a'\n[[engines]]\nname = 'b'\naliases = ['a']", "go by the name 'a'"),
        ("[[engines]]\nname = 'a'\nhot_bytes = '1GiB'", "set this model's share"),
        ("[[engines]]\nname = 'a'\nmodell = 'x'", "did you mean engines.model"),
        ("[[engines]]\nname = 'a'\nunload_after_s = 'soon'", "unload_after_s"),
        ("[engines]\nname = 'a'", "write a table [[engines]]"),
        ("[[engines]]\nname = 'a'\n[capacity]\nsessions = 3\ncontext = 100", "is for one model"),
    ],
)
def test_a_wrong_table_is_refused_with_the_reason(tmp_path, toml, words):
    with pytest.raises(UsageError) as error:
        engines_of(toml, tmp_path)
    assert words in str(error.value)


def test_tokens_of_entries_are_masked():
    (shown,) = masked("engines", [{"name": "a", "token": "secret", "url": "http://u:pw@h"}])
    assert "secret" not in str(shown) and "pw" not in str(shown)


@given(ENTRIES, st.integers(1, 4), st.integers(0, 1 << 40))
def test_models_that_may_be_loaded_at_once_never_take_more_than_the_budget(entries, places, total):
    names = ("engine.hot_bytes", "store.ram_bytes", "store.disk_bytes")
    parts = budget_layers(entries, places, dict.fromkeys(names, total))
    for name in names[:2]:
        assert at_once(entries, places, [x[name].value for x in parts]) <= total
    assert sum(x["store.disk_bytes"].value for x in parts) <= total


def alone(toml: str, folder: Path) -> EffectiveSettings:
    (folder / "t.toml").write_text(toml)
    return effective_settings(layers({}, config=folder / "t.toml"), {"HOME": str(folder)})


def test_replicas_share_their_models_budgets_and_have_folders_of_their_own(tmp_path):
    each = replica_settings(alone(REPLICAS, tmp_path))
    assert list(each) == ["0", "1", "2"]
    assert {x.settings.engine.hot_bytes for x in each.values()} == {1 << 30}
    assert {x.settings.store.ram_bytes for x in each.values()} == {100 << 20}
    paths = [x.settings.store.disk_path for x in each.values()]
    assert len(set(paths)) == 3
    assert Path(paths[0]) == alone(REPLICAS, tmp_path).folders.data  # as without replicas


def test_replicas_of_a_list_are_one_engine_and_have_no_addresses_of_their_own(tmp_path):
    toml = '[engine]\nreplica_list = "http://127.0.0.1:8000/"\nreplicas = 4\n'
    found = alone(toml, tmp_path)
    assert found.engine_kind == "attached" and list(replica_settings(found)) == ["listed"]
    for more in ('url = "http://a"', 'control = "tcp://a:1"', 'token = "t"'):
        with pytest.raises(UsageError, match="leave out"):
            replica_settings(alone(toml + more + "\n", tmp_path))


def test_several_urls_are_replicas_by_their_own_addresses(tmp_path):
    toml = "[engine]\nurl = ['http://a:1', 'http://b:1']\ncontrol = ['tcp://a:2', 'tcp://b:2']\n"
    each = replica_settings(alone(toml, tmp_path))
    assert {url: x.settings.engine.control for url, x in each.items()} == {
        "http://a:1": "tcp://a:2",
        "http://b:1": "tcp://b:2",
    }
    shown = masked("engine.url", "http://u:pw@a http://u:pw@b")
    assert "pw" not in shown and shown.count("***") == 2


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("url = ['http://a:1', 'http://b:1']\ncontrol = 'tcp://a:2'", "2 urls need as many"),
        ("url = ['http://a:1', 'http://a:1']\ncontrol = ['tcp://a:2', 'tcp://b:2']", "twice"),
        ("url = 'http://a:1'\nreplicas = 2", "name each one's url"),
        ("kind = 'fake'\nreplicas = 2\n[capacity]\nsessions = 3\ncontext = 100", "one engine"),
    ],
)
def test_replicas_that_do_not_go_together_are_refused(tmp_path, toml, words):
    with pytest.raises(UsageError, match=words):
        replica_settings(alone(f"[engine]\n{toml}\n", tmp_path))
