"""A model's profile file, written again and again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np
import pytest

from engines.calibration.gate.profiles import make_folder, profile_path, save
from kvstore.codecs.profile import Profile, load_profile
from kvstore.codecs.quality import Quality
from tests.qualities import GOOD
from tests.unit.kvstore.codecs.learning.calibration import model_profile


def row(preset: str, context: int = 2048, kl: float = 0.005) -> Quality:
    return msgspec.structs.replace(GOOD, preset=preset, context=context, kl=kl)


def measured(*rows: Quality) -> Profile:
    """Of presets that had nothing to learn."""
    known = model_profile()
    return Profile(known.fingerprint, known.layout, (), {}, rows)


def test_rows_are_kept_of_presets_that_learned_nothing(tmp_path: Path) -> None:
    path = save(measured(row("tq3")), tmp_path)
    assert path == profile_path(tmp_path, model_profile().fingerprint)
    assert load_profile(path).rows == (row("tq3"),)


def test_earlier_rows_are_found_after_another_measurement(tmp_path: Path) -> None:
    save(dataclasses.replace(model_profile(), rows=(row("max"), row("tq3"))), tmp_path)
    path = save(measured(row("tq3", kl=0.006), row("tq4")), tmp_path)
    found = load_profile(path)
    assert (found.ids, found.ropes) == (model_profile().ids, model_profile().ropes)
    assert found.rows == (row("max"), row("tq3", kl=0.006), row("tq4"))


def test_rows_of_a_preset_that_was_learned_anew_are_dropped(tmp_path: Path) -> None:
    save(dataclasses.replace(model_profile(), rows=(row("max"), row("max", 6144))), tmp_path)
    learned = {name: dict(arrays) for name, arrays in model_profile().learned.items()}
    learned["max"]["means"] = np.array(learned["max"]["means"]) * 2
    path = save(
        dataclasses.replace(model_profile(), learned={"max": learned["max"]}, rows=(row("max"),)),
        tmp_path,
    )
    found = load_profile(path)
    assert found.rows == (row("max"),)
    assert found.ids["max"] != model_profile().ids["max"]
    assert found.ids["dense3"] == model_profile().ids["dense3"]


def test_arrays_learned_from_windows_are_kept_beside_another_measurement(tmp_path: Path) -> None:
    known = model_profile()
    before = dataclasses.replace(
        known,
        rows=(row("dense3"),),
        learned={**known.learned, "dense3@windows": known.learned["dense3"]},
        windows=known.layout,
        window_ropes=known.ropes,
    )
    save(before, tmp_path)
    path = save(measured(row("tq4")), tmp_path)
    found = load_profile(path)
    assert (found.windows, found.window_ropes) == (known.layout, known.ropes)
    assert found.of_windows().ids == {"dense3": known.ids["dense3"]}
    assert set(found.only("dense3+state8").learned) == {"dense3", "dense3@windows"}
    assert found.rows == (row("dense3"), row("tq4"))


def test_rows_of_whole_sessions_go_with_the_arrays_that_they_used(tmp_path: Path) -> None:
    known = model_profile()
    old = (row("max+state8"), row("max+state4"))
    save(dataclasses.replace(known, rows=old), tmp_path)
    learned = {"max": {**known.learned["max"], "means": known.learned["max"]["means"] * 2}}
    anew = dataclasses.replace(known, learned=learned, rows=old[:1])
    assert load_profile(save(anew, tmp_path)).rows == old[:1]


def test_a_damaged_file_and_one_of_another_cache_are_replaced(tmp_path: Path) -> None:
    path = save(model_profile(), tmp_path)
    path.write_bytes(b"TCPF and no more")
    assert save(measured(row("tq3")), tmp_path) == path
    assert load_profile(path).learned == {}
    other = msgspec.structs.replace(model_profile().layout, dtype="float16")
    save(dataclasses.replace(model_profile(), layout=other, rows=(row("max"),)), tmp_path)
    assert load_profile(path).rows == (row("max"),)


def test_calibrations_that_end_together_lose_nothing(tmp_path: Path) -> None:
    presets = [f"tq{n}" for n in range(12)]
    savers = [Thread(target=save, args=(measured(row(x)), tmp_path)) for x in presets]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join(20)
    found = load_profile(profile_path(tmp_path, model_profile().fingerprint))
    assert sorted(x.preset for x in found.rows) == sorted(presets)


def test_the_draft_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    path = save(measured(row("tq3")), tmp_path)
    left = path.with_name(f"{path.name}.4711.new")
    left.write_bytes(b"half a profile")
    others = path.with_name("another-model.tcpf.4712.new")
    others.write_bytes(b"half a profile")
    save(measured(row("tq4")), tmp_path)
    assert not left.exists() and others.exists()


def test_a_folder_that_cannot_be_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(OSError, match="data"):
        make_folder(tmp_path / "data")
    (tmp_path / "profiles").write_text("a file")
    with pytest.raises(OSError, match="profiles"):
        make_folder(tmp_path)
