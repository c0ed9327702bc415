"""Models are found, converted where they are packed, and verified."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from launch.errors import LaunchError, UsageError
from launch.machine.folders import default_cache_dir, default_data_dir, folders
from launch.model.find import (
    MANIFEST,
    Damaged,
    Model,
    find_gguf,
    find_model,
    folder_in,
    sample_model,
    verify,
    write_manifest,
)
from launch.model.gguf import convert, weight_name
from tests.unit.launch.tiny_gguf import (
    TOKENS,
    byte_letters,
    install_package,
    weights,
    write_gguf,
)


@pytest.fixture
def generated(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"weights")
    (tmp_path / "b.json").write_bytes(b"{}")
    write_manifest(tmp_path, "source 1")
    return tmp_path


@pytest.mark.parametrize("name", ["a.bin", "b.json"])
def test_a_changed_byte_is_found(generated, name):
    verify(generated, "source 1")
    content = bytearray((generated / name).read_bytes())
    content[0] ^= 1
    (generated / name).write_bytes(content)
    with pytest.raises(Damaged, match=name):
        verify(generated, "source 1")


def test_a_changed_length_is_found_without_hashing(generated):
    times = (generated / "a.bin").stat()
    (generated / "a.bin").write_bytes(b"weight")
    os.utime(generated / "a.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(Damaged, match="6 bytes instead of 7"):
        verify(generated, "source 1")


def test_a_seen_file_is_not_hashed_again_unless_it_was_touched(generated):
    verify(generated, "source 1")
    os.utime(generated / "a.bin", ns=(2, 2))
    verify(generated, "source 1")
    times = (generated / "a.bin").stat()
    (generated / "a.bin").write_bytes(b"WEIGHTS")  # same length
    os.utime(generated / "a.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    verify(generated, "source 1")
    os.utime(generated / "a.bin", ns=(1, 1))
    with pytest.raises(Damaged, match="another content"):
        verify(generated, "source 1")


def test_another_source_a_missing_file_and_no_manifest(generated):
    with pytest.raises(Damaged, match="another source"):
        verify(generated, "source 2")
    (generated / "b.json").unlink()
    with pytest.raises(Damaged, match=r"b\.json cannot be read"):
        verify(generated, "source 1")
    (generated / MANIFEST).write_bytes(b"{")
    with pytest.raises(Damaged, match="missing or unreadable"):
        verify(generated, "source 1")


@pytest.fixture
def sample(tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    return install_package(site)


def make(tmp_path, sample, said=None):
    said = [] if said is None else said
    return sample_model(tmp_path / "cache", said.append, sample)


def test_it_is_converted_once(tmp_path, sample):
    said: list[str] = []
    folder = make(tmp_path, sample, said)
    assert folder == folder_in(tmp_path / "cache", sample)
    assert [text.partition(" ")[0] for text in said] == ["Converting"]
    before = (folder / "model.safetensors").stat()
    assert make(tmp_path, sample, said) == folder
    assert len(said) == 1
    assert (folder / "model.safetensors").stat().st_ino == before.st_ino
    assert [x.name for x in folder.parent.iterdir() if x.name not in (folder.name, ".lock")] == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "manifest.json"])
def test_damage_is_repaired(tmp_path, sample, name):
    folder = make(tmp_path, sample)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1])
    said: list[str] = []
    make(tmp_path, sample, said)
    assert "is converted again" in said[0]
    assert name == MANIFEST or (folder / name).read_bytes() == whole
    verify(folder, sample.source)


def test_the_draft_of_a_crash_is_removed(tmp_path, sample):
    parent = folder_in(tmp_path / "cache", sample).parent
    (parent / ".Tiny.new").mkdir(parents=True)
    (parent / ".Tiny.new" / "half").write_bytes(b"x")
    folder = make(tmp_path, sample)
    assert sorted(x.name for x in parent.iterdir()) == [".lock", folder.name]


def test_two_at_once_convert_once(tmp_path, sample):
    said: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: make(tmp_path, sample, said), range(3)))
    assert sum(text.startswith("Converting") for text in said) == 1


def test_a_missing_package_says_what_to_install(sample):
    with pytest.raises(LaunchError, match="package no-such-package is missing; install it"):
        find_gguf(replace(sample, package="no-such-package"))


def test_a_damaged_package_is_refused(tmp_path, sample):
    (tmp_path / "site" / "tiny_sample" / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(LaunchError, match="damaged or of another version"):
        make(tmp_path, sample)
    assert not folder_in(tmp_path / "cache", sample).exists()


def test_a_full_disk_is_reported_before_converting(tmp_path, sample):
    with pytest.raises(LaunchError, match="are free; make room"):
        make(tmp_path, replace(sample, needed_bytes=1 << 60))


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, sample):
    (tmp_path / "cache").write_bytes(b"a file, not a folder")
    with pytest.raises(LaunchError, match="THERMOCLINE_CACHE_DIR"):
        make(tmp_path, sample)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "my-model" / "model.safetensors").write_bytes(b"")
    return tmp_path / "my-model"


def test_a_folder_is_called_by_its_name(folder, tmp_path):
    model = find_model(f"{folder}/", tmp_path)
    assert (model.path, model.name, model.folder) == (str(folder), "my-model", folder)
    assert model.config() == {"model_type": "llama"}


def test_a_folder_without_a_model_says_what_is_missing(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    model = find_model(str(folder), tmp_path)
    assert model.config() == {"model_type": "llama"}  # enough to plan
    with pytest.raises(UsageError, match=r"holds no weights \(\*\.safetensors\)"):
        model.require_weights()
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"holds no config\.json; --model wants"):
        find_model(str(folder), tmp_path)


def test_of_a_hub_id_the_engine_fetches_the_weights(folder):
    (folder / "model.safetensors").unlink()
    Model("organisation/name", "name", folder).require_weights()
    Model("organisation/name", "name", None).require_weights()


@pytest.mark.parametrize("content", ["{", "[]", '"text"'])
def test_a_config_that_is_none(folder, tmp_path, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(LaunchError, match=r"config\.json"):
        find_model(str(folder), tmp_path).config()


def test_a_hub_id_is_passed_on(tmp_path):
    model = find_model("no-such-organisation-1/no-such-model", tmp_path)
    assert model.path == "no-such-organisation-1/no-such-model"
    assert model.name == "no-such-model"
    with pytest.raises(LaunchError, match="not on this machine yet"):
        model.config()


@pytest.mark.parametrize("given", ["nope", "./not/here", "/not/here", "a/b/c", "../x", "a b/c"])
def test_a_name_that_is_neither_is_refused(tmp_path, given, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is no model"):
        find_model(given, tmp_path)


def test_folders_follow_the_system():
    assert str(default_cache_dir({"HOME": "/h"}, "linux")) == "/h/.cache/thermocline"
    assert str(default_cache_dir({"HOME": "/h"}, "darwin")) == "/h/Library/Caches/thermocline"
    assert str(default_cache_dir({"XDG_CACHE_HOME": "/c"}, "linux")) == "/c/thermocline"
    relative = {"HOME": "/h", "XDG_DATA_HOME": "c"}
    assert str(default_data_dir(relative, "linux")) == "/h/.local/share/thermocline"
    chosen = {"HOME": "/h", "THERMOCLINE_DATA_DIR": "/d", "THERMOCLINE_CACHE_DIR": "/c"}
    assert [str(x) for x in folders("", "", chosen)] == ["/d", "/c"]
    assert [str(x) for x in folders("/x", "/y", chosen)] == ["/x", "/y"]


GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
# Characters whose kind no edition of Unicode has changed.
OLD_CHARACTERS = st.characters(max_codepoint=0x2FF)
TRICKY = " ab1²½Ⅷ٣東🌈é's\n\t."


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")
    convert(write_gguf(root / "tiny.gguf"), root)
    return root


def test_the_config_is_that_of_the_authors(converted):
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["vocab_size"] == len(TOKENS)


def test_weights_come_back_in_the_usual_row_order(converted):
    read = read_bfloat16(converted / "model.safetensors")
    original = weights()
    assert len(read) == len(original)
    for name, weight in original.items():
        found = read[weight_name(name)]
        assert found.shape == weight.shape
        # Q8_0 keeps 8 bits of a block's largest value, bfloat16 8 bits of each.
        assert np.abs(found - weight).max() < 0.01 * np.abs(weight).max(), name


def read_bfloat16(path):
    """By the library that everybody reads it with, and the header's own words."""
    from safetensors import deserialize

    arrays = {}
    for name, entry in deserialize(path.read_bytes()):
        assert entry["dtype"] == "BF16"
        bits = np.frombuffer(entry["data"], np.uint16).astype(np.uint32) << 16
        arrays[name] = bits.view(np.float32).reshape(entry["shape"])
    return arrays


@given(st.text(OLD_CHARACTERS) | st.text(TRICKY))
def test_text_is_cut_as_llama_cpp_cuts_it(tokenizer, text):
    """There "smollm" means: digits first, one by one, then GPT-2's expression."""
    cut = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    parts = [x for part in regex.split(r"(\p{N})", text) for x in GPT2.findall(part)]
    letters = byte_letters()
    assert cut == ["".join(letters[x] for x in part.encode()) for part in parts]


@given(st.text())
def test_text_comes_back_from_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def tokenizer(converted):
    return Tokenizer.from_file(str(converted / "tokenizer.json"))


def test_digits_stand_alone_and_special_tokens_whole(tokenizer):
    assert tokenizer.encode("12").tokens == ["1", "2"]  # although "12" is in the vocabulary
    assert tokenizer.encode("   5").tokens == ["ĠĠ", "Ġ", "5"]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([1, 2]) == ""
