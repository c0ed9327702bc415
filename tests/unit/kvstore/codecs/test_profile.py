from __future__ import annotations

import dataclasses
from hashlib import blake2b

import msgspec
import numpy as np
import pytest

from kvstore.codecs.names import CALIBRATED
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    MAGIC,
    Profile,
    load_profile,
)
from kvstore.codecs.quality import Quality, TextQuality
from kvstore.errors import Corrupt, Mismatch, UnknownCodec
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile, model_run

FIGURES = {"bits_per_element": 0.9, "perplexity_change_pct": 0.5, "kl": 0.004, "top1": 0.97}
FIGURES |= {"cos_k": 0.99, "cos_v": 0.96, "error_k": 0.01, "error_v": 0.08}
NEEDLES = {"context": 2048, "needle_found": 6, "needle_total": 6}
PROSE = TextQuality(text="prose", kl=0.006, perplexity_change_pct=0.7, top1=0.96)
ROW = Quality(preset="max", codec_id="max.1-0123456789", texts=(PROSE,), **NEEDLES, **FIGURES)


def file_of(folder, profile=None):
    path = folder / "profile"
    (profile or dataclasses.replace(model_profile(), rows=(ROW,))).save(path)
    return path


def with_digest(body):
    return body + blake2b(body, digest_size=DIGEST_BYTES).digest()


def test_rotated_values_are_part_of_a_file_and_of_ids(tmp_path):
    before = model_profile()
    turned = tuple(msgspec.structs.replace(x, side="values") for x in before.ropes if x)
    latent = dataclasses.replace(before, ropes=turned)
    assert load_profile(file_of(tmp_path, latent)).ropes == turned
    assert latent.ids.keys() == before.ids.keys()
    assert set(latent.ids.values()).isdisjoint(before.ids.values())


def test_a_saved_profile_is_loaded(tmp_path):
    path = file_of(tmp_path)
    before, after = model_profile(), load_profile(path)
    assert [x.name for x in tmp_path.iterdir()] == ["profile"], "nothing is left lying about"
    for field in ("fingerprint", "layout", "ropes", "ids"):
        assert getattr(after, field) == getattr(before, field)
    assert after.rows == (ROW,)
    for preset, arrays in before.learned.items():
        for name, array in arrays.items():
            assert after.learned[preset][name].dtype == array.dtype
            assert np.array_equal(after.learned[preset][name], array)


def test_a_profile_in_memory_needs_its_file_no_more(tmp_path):
    path = file_of(tmp_path)
    mapped = load_profile(path, mapped=True)
    own = mapped.in_memory()
    path.write_bytes(b"")  # to read a mapped array now would end the process
    before = model_profile()
    assert own.ids == before.ids and own.rows == (ROW,)
    for preset, arrays in own.learned.items():
        for name, array in arrays.items():
            assert np.array_equal(array, before.learned[preset][name])
            assert not array.flags.writeable


def test_a_file_of_many_pieces_is_loaded_and_its_damage_noticed(tmp_path):
    values = np.random.default_rng(0).integers(0, 255, 3 * BLOCK_BYTES + 77, np.uint8)
    learned = {"one": {"a": values[:-99], "b": values[-99:]}, "two": {"c": np.zeros((3, 0))}}
    learned["two"]["c"] = learned["two"]["c"].astype(np.float32)
    path = file_of(tmp_path, dataclasses.replace(model_profile(), learned=learned))
    loaded = load_profile(path).learned
    for preset, name in (("one", "a"), ("one", "b"), ("two", "c")):
        assert np.array_equal(loaded[preset][name], learned[preset][name])
        assert not loaded[preset][name].flags.writeable
    whole = bytearray(path.read_bytes())
    for at in (BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5, len(whole) - 1):
        whole[at] ^= 1
        path.write_bytes(whole)
        with pytest.raises(Corrupt, match="damaged"):
            load_profile(path)
        whole[at] ^= 1


def test_a_preset_alone_holds_no_memory_of_the_others(tmp_path):
    """A preset of a large model is gigabytes."""
    one = load_profile(file_of(tmp_path)).only("dense3")
    assert list(one.learned) == ["dense3"] and one.rows == ()
    bases = [x if x.base is None else x.base for x in one.learned["dense3"].values()]
    assert sum(x.nbytes for x in bases) == sum(x.nbytes for x in one.learned["dense3"].values())


@pytest.mark.parametrize("name", CALIBRATED)
def test_a_loaded_profile_makes_the_same_codec(tmp_path, name):
    layout = model_layout()
    profiles = (model_profile(), load_profile(file_of(tmp_path)))
    fresh, loaded = (open_codec(name, x) for x in profiles)
    run = model_run(layout, 64)
    payload = fresh.encode(run, layout, 0)
    assert loaded == fresh and loaded.encode(run, layout, 0) == payload
    loaded.decode(memoryview(payload), layout, 0, layout.empty(64))


def test_an_id_stands_for_the_learned_arrays_and_nothing_else():
    profile = model_profile()
    measured = dataclasses.replace(profile, rows=(ROW,), fingerprint="other name")
    assert measured.ids == profile.ids
    changed = {name: dict(arrays) for name, arrays in profile.learned.items()}
    changed["max"]["means"] = changed["max"]["means"] * 2
    other = dataclasses.replace(profile, learned=changed)
    differing = [name for name in CALIBRATED if other.ids[name] != profile.ids[name]]
    assert differing == ["max"]


def test_a_preset_that_was_not_learned_is_unknown():
    profile = dataclasses.replace(model_profile(), learned={})
    with pytest.raises(UnknownCodec, match="calibrate"):
        open_codec("max", profile)
    assert open_codec("dense3", profile).id == "dense3.2"


def test_any_damage_is_noticed(tmp_path):
    path = file_of(tmp_path)
    whole = path.read_bytes()
    for number in np.random.default_rng(0).integers(0, 8 * len(whole), 40).tolist():
        damaged = bytearray(whole)
        damaged[number // 8] ^= 1 << number % 8
        path.write_bytes(damaged)
        with pytest.raises(Corrupt, match="profile"):
            load_profile(path)
    for length in (0, 3, 8, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(Corrupt):
            load_profile(path)


FOREIGN = [
    (b'"dtype":"<f4"', b'"dtype":"|O8"'),
    *((b'"shape":[1]', b'"shape":[%b]' % x) for x in (b"-1", b"99999999", b"99")),
    (b'"fingerprint"', b'"finger"'),
    (b'"arrays":[', b'"arrays":[['),
]


@pytest.mark.parametrize(("old", "new"), FOREIGN)
def test_a_file_that_another_program_made_is_refused(tmp_path, old, new):
    path = file_of(tmp_path)
    body = path.read_bytes()[:-DIGEST_BYTES]
    length = int.from_bytes(body[4:8], "little")
    header, arrays = body[8 : 8 + length], body[-(-(8 + length) // 64) * 64 :]
    assert old in header
    header = header.replace(old, new, 1)
    start = body[:4] + len(header).to_bytes(4, "little") + header
    path.write_bytes(with_digest(start.ljust(-(-len(start) // 64) * 64, b"\0") + arrays))
    with pytest.raises(Corrupt):
        load_profile(path)


@pytest.mark.parametrize("version", [b"3", b"5"])
def test_another_version_is_refused(tmp_path, version):
    path = file_of(tmp_path)
    body = path.read_bytes()[:-DIGEST_BYTES]
    path.write_bytes(with_digest(body.replace(b'"version":4', b'"version":' + version, 1)))
    with pytest.raises(Mismatch, match="calibrate again"):
        load_profile(path)


def test_a_profile_of_nothing(tmp_path):
    empty = Profile("f", model_layout(), (None,) * 3, {})
    assert load_profile(file_of(tmp_path, empty)).learned == {}


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "profile").mkdir()  # in the way
    with pytest.raises(OSError):
        file_of(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["profile"]


HEADERS = {
    "deep": b"[" * 100_000,
    "not utf-8": b'{"version": "\xff"}',
    "infinite": b'{"version": 1e999}',
    "nan": b'{"version": NaN}',
    "bytes": b"\xff\xfe",
    "digits": b'{"version": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_whose_digest_was_made_to_fit_is_refused_by_one_error(tmp_path, header):
    path = tmp_path / "profile"
    path.write_bytes(with_digest(MAGIC + len(header).to_bytes(4, "little") + header + bytes(8)))
    with pytest.raises((Corrupt, Mismatch)):
        load_profile(path)
