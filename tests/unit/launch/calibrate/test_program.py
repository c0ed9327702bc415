"""The names that ``--presets`` takes, and the order at a model's first start."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.config import CalibrationOrder
from kvstore.codecs.names import LITERATURE, OWN
from launch.calibrate.program import CalibrateOptions, order_of, presets_of
from launch.cli.options import layers
from launch.errors import UsageError
from launch.model.find import find_model
from launch.settings.effective_settings import effective_settings


def test_groups_and_names() -> None:
    assert set(presets_of("ours")) == {*OWN}
    assert set(presets_of(None)) == {*OWN, "fp8", "q8"}
    assert set(presets_of("all")) == {*OWN, *LITERATURE}
    assert presets_of("max, tq3") == ("max", "tq3")


def test_each_preset_is_measured_once() -> None:
    found = presets_of("tq3,manthan,ours,tq3")
    assert found[:2] == ("tq3", "manthan") and len(found) == len(set(found))


def test_a_name_that_no_codec_has() -> None:
    with pytest.raises(UsageError, match="--presets: no codec named 'tq9'"):
        presets_of("ours,tq9")
    with pytest.raises(UsageError, match="--presets: no codec named ''"):
        presets_of("")


def ordered(folder: Path, options: CalibrateOptions) -> CalibrationOrder:
    flags = {"--model": str(folder), "--engine": "mlx"}
    settings = effective_settings(layers({}, flags=flags), {"HOME": str(folder)})
    model = find_model(settings.settings.engine.model, settings.folders.cache)
    return order_of(settings, model, options)


def contexts_for(folder: Path, longest: int | None, wished: str | None) -> tuple[int, ...]:
    stated = f'"max_position_embeddings": {longest}' if longest else ""
    (folder / "config.json").write_text(f"{{{stated}}}")
    (folder / "model.safetensors").touch()
    return ordered(folder, CalibrateOptions((), (), None, wished)).contexts


@pytest.mark.parametrize(
    ("longest", "contexts"),
    [(8192, (2048, 6144)), (None, (2048, 6144)), (4096, (2048,)), (2048, (1536,)), (700, (128,))],
)
def test_usual_contexts_are_those_that_the_model_takes(tmp_path, longest, contexts):
    assert contexts_for(tmp_path, longest, None) == contexts


def test_a_context_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    assert contexts_for(tmp_path, 4096, "3584") == (3584,)
    with pytest.raises(UsageError, match="takes 4096 tokens, .* ask for 3584 at most"):
        contexts_for(tmp_path, 4096, "3585")
    with pytest.raises(UsageError, match="to measure it takes 640"):
        contexts_for(tmp_path, 600, None)
    with pytest.raises(UsageError, match="1048576 tokens are the most"):
        contexts_for(tmp_path, None, "99999999999")


def test_a_context_and_a_text_are_measured_once(tmp_path: Path) -> None:
    assert contexts_for(tmp_path, 4096, "256, 128,256") == (256, 128)
    text = tmp_path / "some.txt"
    text.write_text("Once.")
    twice = (text, tmp_path / "." / "some.txt")
    assert ordered(tmp_path, CalibrateOptions(twice, (), None, None)).fit_texts == (str(text),)
    assert ordered(tmp_path, CalibrateOptions((), twice, None, None)).eval_texts == (str(text),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\x7fELF\0\0\0", "is not text"),
        ("in UTF-16".encode("utf-16"), "is not text; give a file in UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_neither_learned_from_nor_judged_by(tmp_path, content, said):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    file = tmp_path / "some.txt"
    file.write_bytes(content)
    for wishes in (
        CalibrateOptions((file,), (), None, None),
        CalibrateOptions((), (file,), None, None),
    ):
        with pytest.raises(UsageError, match=said):
            ordered(tmp_path, wishes)
    file.write_bytes("Grüße, in Latin-1".encode("latin-1"))
    assert ordered(tmp_path, wishes).eval_texts == (str(file),)
