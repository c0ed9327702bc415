"""The codecs of an engine that runs, while its model's profile comes, goes and changes."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines.calibration.gate.profiles import profile_path, save
from engines.calibration.gate.served_codecs import ServedCodecs
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile, profile_in
from kvstore.codecs.stacks.fused import FusedPacker, for_sizes_alone
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused
from kvstore.shapes import KVLayer, KVLayout
from tests.unit.engines.calibration.gate.test_choice import LAYOUT, all_timed, measured, row, timed
from tests.unit.kvstore.codecs.learning.calibration import FINGERPRINT, model_metrics
from tests.unit.kvstore.codecs.samples import run_of


class Store:
    """Records the codecs that an engine's store is asked to adopt."""

    def __init__(self) -> None:
        self.adopted: list[tuple[StoreCodecs, bool]] = []

    def adopt(self, codecs: StoreCodecs, *, keep: bool) -> None:
        self.adopted.append((codecs, keep))


def served(data: Path | None, **config) -> ServedCodecs:
    return ServedCodecs(StoreConfig(**config), LAYOUT, FINGERPRINT, data)


def write(profile: Profile, data: Path) -> Path:
    path = profile_path(data, FINGERPRINT)
    path.parent.mkdir(exist_ok=True)
    profile.save(path)
    return path


def test_the_profile_decides_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    write(measured(row("dense3")), tmp_path)
    codecs = served(tmp_path)
    report = codecs.report
    assert report.name == "dense3" and report.id == codecs.codecs.rows.id
    assert (report.rows, report.unmeasured) == ((row("dense3"),), False)
    assert report.fingerprint == FINGERPRINT
    assert "KL 0.0050 at 2048 tokens" in caplog.text
    # Sessions that were saved while nothing was measured are still read.
    assert [x.id for x in codecs.codecs.readable] == ["raw.1"]


def test_what_packs_is_compiled_when_no_request_waits(tmp_path: Path):
    layout = KVLayout("bfloat16", (KVLayer(1, 64, 64),))  # kernels take no heads of 16 channels
    samples = Samples(layout, (None,), [run_of(layout, 300)], model_metrics(layout))
    profile = learn_profile(samples, FINGERPRINT, ["dense3"])
    with for_sizes_alone():
        rows = (row("dense3", codec_id=open_codec("dense3", profile).id),)
    write(dataclasses.replace(profile, rows=rows), tmp_path)

    def parts(codecs: StoreCodecs | None) -> list[FusedPacker]:
        assert codecs is not None and isinstance(codecs.rows, StackCodec)
        return [x for x in codecs.rows.assemble(layout) if isinstance(x, FusedPacker)]

    codecs = ServedCodecs(StoreConfig(), layout, FINGERPRINT, tmp_path)
    assert not any(x.packing_is_proven.is_set() for x in parts(codecs.codecs))
    codecs.compile_rest()
    assert parts(codecs.codecs) and all(x.packing_is_proven.wait(60) for x in parts(codecs.codecs))
    assert codecs.codecs.profile is not None
    others = parts(codecs.opened(codecs.codecs.profile))  # of another server: they only restore
    assert others and not any(x.packing_is_proven.is_set() for x in others)


def test_a_profile_that_comes_later_is_adopted(tmp_path: Path):
    codecs, store = served(tmp_path), Store()
    assert codecs.report.name == "raw" and codecs.report.unmeasured
    codecs.renew(store.adopt)  # nothing is there yet
    write(measured(row("dense3")), tmp_path)
    codecs.renew(store.adopt)
    assert [(x.rows.id, keep) for x, keep in store.adopted] == [
        ("raw.1", True),
        (codecs.codecs.rows.id, True),
    ]
    assert codecs.report.name == "dense3" and not codecs.report.unmeasured


def test_a_verdict_of_few_texts_serves_and_is_still_to_be_renewed(tmp_path: Path):
    early = msgspec.structs.replace(row("dense3"), is_early=True)
    write(measured(early), tmp_path)
    codecs = served(tmp_path, learn_on=False)
    assert codecs.report.name == "dense3" and not codecs.report.unmeasured
    assert codecs.unmeasured and codecs.has_open_questions
    write(measured(early, row("dense3", context=1024)), tmp_path)
    codecs.renew(Store().adopt)
    assert not codecs.has_open_questions


def test_a_named_codec_that_is_refused_while_it_serves_gives_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    codecs, store = served(tmp_path, codec="tq3"), Store()
    assert codecs.report.unmeasured
    write(measured(row("tq3", kl=0.0289)), tmp_path)
    codecs.renew(store.adopt)
    ((adopted, _),) = store.adopted
    assert adopted.rows.id == "raw.1" and not adopted.readable
    assert "KL of 0.0289" in codecs.report.why and not codecs.report.unmeasured
    assert "KL of 0.0289" in caplog.text
    with pytest.raises(CodecRefused, match=r"KL of 0\.0289"):
        served(tmp_path, codec="tq3")


def test_auto_says_why(tmp_path: Path):
    write(measured(*all_timed()), tmp_path)
    codecs = served(tmp_path)
    report = codecs.report
    assert (report.name, report.id) == ("balanced", codecs.codecs.rows.id)
    assert report.why.startswith("balanced: KL 0.0050") and "9.0%" in report.why
    assert [x.preset for x in report.rows] == ["balanced"]
    assert "dense3" in [x.preset for x in report.others]
    assert not any(x.texts or x.chains for x in report.rows)


def test_a_codec_that_is_only_too_slow_now_is_read_on(tmp_path: Path):
    write(measured(*all_timed()), tmp_path)
    codecs, store = served(tmp_path), Store()
    slower = (timed("dense3", 0.05), timed("balanced", 0.15), timed("max", 0.3))
    write(measured(*slower), tmp_path)
    codecs.renew(store.adopt)
    ((adopted, keep),) = store.adopted
    assert adopted.rows.id.startswith("dense3") and keep
    write(measured(timed("dense3", 0.05, kl=0.5), timed("balanced", 0.15)), tmp_path)
    codecs.renew(store.adopt)
    assert [keep for _, keep in store.adopted] == [True, False]  # dense3 is out of bounds


def test_a_profile_that_is_no_use_is_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(measured(row("dense3")), tmp_path)
    whole = path.read_bytes()
    other_model = dataclasses.replace(measured(row("dense3")), fingerprint="another")
    other_model.save(path.with_name("other"))
    for content in (whole[:-1], b"", path.with_name("other").read_bytes()):
        path.write_bytes(content)
        report = served(tmp_path).report
        assert (report.name, report.unmeasured) == ("raw", True)
    assert "damaged" in caplog.text and "belongs to another model" in caplog.text
    assert served(None).report.unmeasured


def test_integers_that_no_learning_gives_count_as_nothing_learned(tmp_path: Path):
    """Whole by its digest, but written by something else: kernels would read beyond its arrays."""
    profile = measured(row("dense3"))
    learned = dict(profile.learned["dense3"])
    learned["levels.0"] = learned["levels.0"][..., :8]
    write(dataclasses.replace(profile, learned={"dense3": learned}), tmp_path)
    report = served(tmp_path).report
    assert (report.name, report.unmeasured) == ("raw", True)
    with pytest.raises(CodecRefused, match="yet to learn this model"):
        served(tmp_path, codec="dense3", calibrate=False)


def learned_anew(factor: float, **changes: object) -> Profile:
    """``dense3`` with other levels, measured."""
    learned = {name: dict(arrays) for name, arrays in measured().learned.items()}
    name = next(x for x, y in learned["dense3"].items() if y.dtype == np.float32)
    learned["dense3"][name] = np.array(learned["dense3"][name]) * np.float32(factor)
    profile = dataclasses.replace(measured(), learned={"dense3": learned["dense3"]})
    codec_id = open_codec("dense3", profile).id
    return dataclasses.replace(profile, rows=(row("dense3", codec_id=codec_id, **changes),))


def test_a_codec_that_packed_before_is_read_by_the_profile_beside_the_data(tmp_path: Path):
    (tmp_path / "profiles").mkdir()
    save(measured(row("dense3", kl=0.009)), tmp_path)
    before = served(tmp_path).codecs
    assert before.profile is not None and [x.id for x in before.readable] == ["raw.1"]
    save(learned_anew(1.01, kl=0.004), tmp_path)
    codecs = served(tmp_path)
    assert codecs.codecs.rows.id != before.rows.id
    read = codecs.opened(before.profile)
    assert read is not None and read.rows.id == before.rows.id
    assert served(tmp_path, max_kl=0.005).opened(before.profile) is None, "out of the bound"
    assert served(tmp_path, codec="raw").opened(before.profile) is None, "nothing with loss"


def test_what_another_server_learned_is_read_within_this_ones_bound(tmp_path: Path):
    (tmp_path / "there").mkdir()
    write(learned_anew(1.01, kl=0.009), tmp_path / "there")
    theirs = served(tmp_path / "there").codecs
    assert theirs.profile is not None and theirs.written_ids == [theirs.rows.id]
    fetched = profile_in(theirs.profile.to_bytes())
    here = served(tmp_path)  # has measured nothing yet
    opened = here.opened(fetched)
    assert opened is not None and opened.written_ids == theirs.written_ids
    assert served(tmp_path, max_kl=0.005).opened(fetched) is None
    assert served(tmp_path, codec="raw").opened(fetched) is None
    assert here.opened(dataclasses.replace(fetched, fingerprint="another model")) is None
    # Its own figures of the same codec count for more.
    write(learned_anew(1.01, kl=0.5), tmp_path)
    assert here.opened(fetched) is None


def test_it_learns_on_until_the_densest_is_known(tmp_path: Path):
    assert served(tmp_path).learns_on
    write(measured(row("dense3")), tmp_path)
    assert served(tmp_path).learns_on
    for config in ({"learn_on": False}, {"calibrate": False}, {"codec": "dense3"}):
        assert not served(tmp_path, **config).learns_on
    write(measured(row("dense3"), row("max", kl=0.5)), tmp_path)
    assert not served(tmp_path).learns_on, "measured, though it is refused"
