from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from engines.kv_budget import KVCost
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.model import loading
from engines.mlx_worker.model.loading import (
    MOST_SAMPLING_BYTES,
    SAMPLING_FILE,
    LoadedModel,
    UsualSampling,
    chosen_dtype,
    fingerprint,
)
from engines.openai.requests import validate_chat
from kvstore.shapes import KVLayer, KVLayout

pytestmark = pytest.mark.mlx

PLAN = CachePlan(("KVCache",), KVCost(8), KVLayout(dtype="float32", layers=(KVLayer(1, 1, 1),)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"vocab_size": 5}))
    (made / "tokenizer.json").write_text("{}")
    weights = {"a": mx.arange(200_000, dtype=mx.float32), "b": mx.ones((3, 3))}
    mx.save_safetensors(str(made / "model.safetensors"), weights)
    return made


def loaded(folder: Path | None, dtype: mx.Dtype = mx.float32) -> LoadedModel:
    model = nn.Linear(2, 2)
    model.update({"weight": mx.ones((2, 2)), "bias": mx.zeros(2)})
    model.set_dtype(dtype)
    return LoadedModel(model, None, {"vocab_size": 5}, folder)


def test_the_same_files_elsewhere_have_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, there)
    assert fingerprint(loaded(folder), PLAN) == fingerprint(loaded(there), PLAN)


def test_each_change_that_may_change_kv_changes_the_fingerprint(folder: Path) -> None:
    prints = {fingerprint(loaded(folder), PLAN), fingerprint(loaded(folder, mx.float16), PLAN)}
    other = CachePlan(("KVCache", "ArraysCache"), PLAN.cost, PLAN.layout)
    prints.add(fingerprint(loaded(folder), other))
    (folder / "tokenizer.json").write_text('{"x": 1}')
    prints.add(fingerprint(loaded(folder), PLAN))
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    prints.add(fingerprint(loaded(folder), PLAN))
    file.write_bytes(content + b"\0")
    prints.add(fingerprint(loaded(folder), PLAN))
    shutil.copy(file, folder / "model-2.safetensors")
    prints.add(fingerprint(loaded(folder), PLAN))
    assert len(prints) == 7


def test_a_model_built_in_code_is_identified_by_its_weights() -> None:
    one, other = loaded(None), loaded(None)
    assert fingerprint(one, PLAN) == fingerprint(other, PLAN)
    other.model.update({"bias": mx.ones(2)})
    assert fingerprint(one, PLAN) != fingerprint(other, PLAN)


def test_the_dtype_of_this_machine() -> None:
    assert chosen_dtype("bfloat16") == "bfloat16"
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert chosen_dtype("auto") == ("float32" if on_cpu else None)


def test_the_context_is_taken_from_the_config() -> None:
    def context(config: dict[str, object]) -> int:
        return LoadedModel(None, None, {"vocab_size": 5, **config}).max_context

    assert context({"max_position_embeddings": 77}) == 77
    assert context({"text_config": {"max_position_embeddings": 78}}) == 78
    assert context({}) == 32_768


@pytest.mark.parametrize("library", ["mlx", "mlx-lm"])
def test_kv_of_another_mlx_version_is_another_models(library, folder, monkeypatch):
    before = fingerprint(loaded(folder), PLAN)
    monkeypatch.setattr(loading, "version", lambda x: "9.9" if x == library else version(x))
    assert fingerprint(loaded(folder), PLAN) != before


QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_what_a_request_names_goes_before_what_the_model_asks_for(tmp_path: Path) -> None:
    content = {**QWEN, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / SAMPLING_FILE).write_text(json.dumps(content))
    usual = UsualSampling.of(tmp_path)
    plain = usual.filled_in(validate_chat(dict(HI)))
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.7, 0.8, 20)
    assert (plain.repetition_penalty, plain.min_p, plain.seed) == (1.05, None, None)
    own = usual.filled_in(validate_chat({**HI, "temperature": 0, "top_k": -1}))
    assert (own.temperature, own.top_p, own.top_k) == (0, 0.8, -1)


ODD = ['"temperature": "hot"', '"temperature": NaN', '"temperature": true', '"min_p": 7']
ODD += ['"repetition_penalty": 1e400', '"max_length": Infinity', f'"max_length": 1{"0" * 400}']


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_one_odd_value_takes_no_other_with_it(tmp_path: Path, odd: str, mark: str) -> None:
    content = f'{mark}{{{odd}, "top_p": 0.8, "top_k": 20.0}}'
    (tmp_path / SAMPLING_FILE).write_text(content, encoding="utf-8")
    usual = UsualSampling.of(tmp_path)
    assert usual == UsualSampling(top_p=0.8, top_k=20) and type(usual.top_k) is int


def test_a_file_of_more_than_a_mebibyte_is_not_read(tmp_path: Path) -> None:
    (tmp_path / SAMPLING_FILE).write_text('{"top_k": 20}' + " " * MOST_SAMPLING_BYTES)
    assert UsualSampling.of(tmp_path) == UsualSampling()
    (tmp_path / SAMPLING_FILE).write_text('{"top_k": 20}' + " " * (MOST_SAMPLING_BYTES - 13))
    assert UsualSampling.of(tmp_path) == UsualSampling(top_k=20)


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"temperature": "hot"}', '{"top_p": 7}', '{"top_k": 1.5}']
)
def test_a_file_that_says_nothing_usable_changes_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / SAMPLING_FILE).write_text(content)
    request = validate_chat(dict(HI))
    assert UsualSampling.of(tmp_path).filled_in(request) is request
