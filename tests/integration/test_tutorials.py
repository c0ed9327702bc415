"""The tutorials run, draw their pictures, and print what their pages say."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

import thermocline
from docs.tutorials import codebooks, own_method, rotation, sketches
from kvstore.codecs.names import CODECS
from tests.command_line import program
from tests.tiny_tokenizer import tiny_tokenizer


@pytest.mark.parametrize(
    "tutorial", [codebooks, rotation, sketches, own_method], ids=lambda x: x.__name__
)
def test_it_prints_figures_and_draws_a_picture(tutorial, tmp_path, capsys, monkeypatch):
    few = partial(codebooks.measured, 20_000)  # of its own number of values it takes seconds
    monkeypatch.setattr(codebooks, "measured", few)
    picture = tmp_path / "picture.png"
    tutorial.main(["--plot", str(picture)])
    assert len(capsys.readouterr().out.splitlines()) > 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_levels_of_lloyd_and_max_lose_less_than_equidistant_ones():
    rows = codebooks.measured(50_000)
    assert all(x.bound < x.lloyd_max <= x.equidistant * 1.001 for x in rows)
    assert rows[2].lloyd_max < 0.95 * rows[2].equidistant


def test_a_rotation_saves_the_large_channels():
    keys = rotation.uneven_keys()
    lm3, tq3, _ = rotation.measured(keys)
    assert tq3.error < lm3.error / 5
    assert tq3.large_channels < lm3.large_channels / 50


def test_sketches_are_unbiased_and_noisier():
    _, rows = sketches.measured(*sketches.rows())
    by_name = {x.method: x for x in rows}
    for bits, slope in ((2, 0.94), (3, 0.98)):
        levels, sketch = by_name[f"tq:bits={bits}"], by_name[f"tqprod:bits={bits}"]
        assert levels.slope == pytest.approx(slope, abs=0.01)
        assert sketch.slope == pytest.approx(1, abs=0.01)
        assert sketch.error > 1.5 * levels.error


def test_an_own_method_gets_better_step_by_step_and_serves_by_its_name():
    by_name = {x.method: x for x in own_method.measured(rotation.uneven_keys())}
    levels, groups, turned = (by_name[x] for x in ("levels", "groups", "turned"))
    assert turned.error < groups.error < levels.error / 3
    assert turned.bits == levels.bits < groups.bits
    lines = own_method.__doc__.partition("# own_method_module.py")[2]
    module, _, _ = lines.partition("    # thermocline.toml")
    try:
        exec(textwrap.dedent(module), {})
        keys = rotation.uneven_keys(64)
        own = own_method.methods()["turned"]
        assert thermocline.codec("mine").pack(keys).payload == own.pack(keys).payload
        assert thermocline.codecs()["mine"].sentence.startswith("Rotates a row")
    finally:
        CODECS.pop("mine", None)


@pytest.mark.model
@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.thorough
def test_a_needle_is_found_in_packed_rows():
    root = Path(__file__).parents[2]
    run = program(sys.executable, "-m", "docs.tutorials.live_cache", timeout=280, cwd=root)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("'71942") == 3, run.stdout


@pytest.mark.mlx
def test_a_learned_transform_needs_fewer_bits(tmp_path):
    from docs.tutorials import spectrum
    from kvstore.codecs.stacks.stack_shape import Scope
    from tests.integration.tiny_models import tiny_model

    scopes = (Scope("head"), Scope("layer"))
    rows = spectrum.measured(tiny_model("llama").model, tiny_tokenizer(tmp_path), scopes, 4, 200)
    for row in rows:
        assert row.bits(0.1) < row.bits(0.01)
        assert row.bits(spectrum.ERROR) < 2.3  # without a transform: 2.42
