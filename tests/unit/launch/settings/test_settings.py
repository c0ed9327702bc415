"""Settings from all sources, in their units, and the mistakes that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cli.options import FLAGS, layers
from launch.errors import UsageError
from launch.settings.schema import Settings, flat, masked, resolve
from launch.settings.sources import Fields, from_environment, from_toml, variable_of
from launch.settings.units import parse_bytes, parse_duration, show_bytes, show_duration, shown

FIELDS = Fields(Settings)


def settings_of(environ=None, toml: str = "", tmp_path: Path | None = None, **options):
    if tmp_path is not None:
        (tmp_path / "t.toml").write_text(toml)
        options["config"] = tmp_path / "t.toml"
    return resolve(layers(environ or {}, **options))


def test_later_sources_win(tmp_path):
    toml = "[engine]\nmax_batch = 2\nprefill_step = 64\nmax_context = 100\n"
    environ = {"THERMOCLINE_ENGINE__MAX_BATCH": "3", "THERMOCLINE_ENGINE__PREFILL_STEP": "128"}
    found = settings_of(
        environ,
        toml,
        tmp_path,
        profile="apple",
        assignments=["engine.max_batch=4"],
        flags={"--model": "here", "--host": None},
    )
    engine = found.settings.engine
    assert (engine.max_batch, engine.prefill_step, engine.max_context) == (4, 128, 100)
    assert engine.model == "here"
    assert found.settings.gateway.host == "127.0.0.1"
    assert found.origin("engine.max_batch") == "--set"
    assert found.origin("engine.prefill_step") == "environment THERMOCLINE_ENGINE__PREFILL_STEP"
    assert found.origin("engine.max_context") == str(tmp_path / "t.toml")
    assert found.origin("engine.model") == "--model"
    assert found.origin("gateway.host") == "default"


def test_the_environment_names_file_and_profile(tmp_path):
    (tmp_path / "t.toml").write_text("[store]\ncodec = 'raw'\n")
    found = settings_of(
        {"THERMOCLINE_CONFIG": str(tmp_path / "t.toml"), "THERMOCLINE_PROFILE": "cpu"}
    )
    assert found.settings.store.codec == "raw"
    assert found.origin("engine.max_batch") == "profile cpu"


def test_text_becomes_the_type_of_the_field():
    found = settings_of(
        {
            "THERMOCLINE_ENGINE__HOT_BYTES": "1.5GiB",
            "THERMOCLINE_SCHEDULER__IDLE_AFTER_S": "10m",
            "THERMOCLINE_STORE__MAX_KL": "0.5",
            "THERMOCLINE_GATEWAY__PORT": "9000",
            "THERMOCLINE_GATEWAY__MODEL_ALIASES": "gpt-4o, gpt-4o-mini",
            "THERMOCLINE_ALLOW_ANONYMOUS": "yes",
            "THERMOCLINE_CACHE_DIR": "/elsewhere",
            "HOME": "/not/ours",
        }
    ).settings
    assert found.engine.hot_bytes == 3 << 29
    assert found.scheduler.idle_after_s == 600.0
    assert found.store.max_kl == 0.5
    assert found.gateway.port == 9000
    assert found.gateway.model_aliases == ("gpt-4o", "gpt-4o-mini")
    assert found.allow_anonymous is True
    assert found.cache_dir == "/elsewhere"


def test_settings_of_one_engine_only_are_one_level_deeper(tmp_path):
    toml = "[engine.vllm]\npython = '/opt/vllm/bin/python'\nargs = ['--seed', '1']\n"
    found = settings_of(
        {"THERMOCLINE_ENGINE__VLLM__BLOCK_TOKENS": "64"},
        toml,
        tmp_path,
        assignments=["engine.vllm.tensor_parallel=2"],
    )
    vllm = found.settings.engine.vllm
    assert (vllm.python, vllm.args) == ("/opt/vllm/bin/python", ("--seed", "1"))
    assert (vllm.block_tokens, vllm.tensor_parallel) == (64, 2)


def test_units_may_be_written_in_a_file(tmp_path):
    toml = "[store]\nram_bytes = '2 GiB'\ndisk_bytes = 4096\nredis_deadline_s = '1m'\n"
    store = settings_of({}, toml, tmp_path).settings.store
    assert (store.ram_bytes, store.disk_bytes, store.redis_deadline_s) == (2 << 30, 4096, 60.0)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"THERMOCLINE_ENGINE__HOTBYTES": "1"},
            "ENGINE__HOTBYTES in the environment is not a setting; did you mean"
            " THERMOCLINE_ENGINE__HOT_BYTES?",
        ),
        ({"thermocline_engine__hot_bytes": "5GiB"}, "in capitals: THERMOCLINE_ENGINE__HOT_B"),
        ({"Thermocline_Url": "http://h"}, "in capitals: THERMOCLINE_URL"),
        ({"thermocline_engine__hotbytes": "5GiB"}, "__hotbytes in the environment is not a sett"),
        ({"THERMOCLINE_PROFIL": "cpu"}, "did you mean THERMOCLINE_PROFILE?"),
        ({"THERMOCLINE_ZZZ": "1"}, "THERMOCLINE_ZZZ in the environment is not a setting"),
        (
            {"THERMOCLINE_ENGINE__MAX_BATCH": "many"},
            "engine.max_batch (from environment THERMOCLINE_ENGINE__MAX_BATCH): 'many' is not",
        ),
        ({"THERMOCLINE_ENGINE__MAX_BATCH": "0"}, "engine.max_batch (from environment"),
        ({"THERMOCLINE_ALLOW_ANONYMOUS": "maybe"}, "neither true nor false"),
        ({"THERMOCLINE_PROFILE": "gpu"}, "there is no profile 'gpu'; there are: apple, cpu, cuda,"),
        ({"THERMOCLINE_LOG_LEVEL": "loud"}, "log_level (from environment"),
    ],
)
def test_mistakes_in_the_environment(environ, words):
    with pytest.raises(UsageError) as caught:
        settings_of(environ)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[engine]\nmax_bach = 1", "engine.max_bach in x.toml is not a setting; did you mean"),
        ("[engin]\nmax_batch = 1", "engin in x.toml is not a setting"),
        ("engine = 3", "engine in x.toml is not a setting"),
        ("[engine.vllm]\npyton = 1", "engine.vllm.pyton in x.toml is not a setting; did you mean"),
        ("[engine", "x.toml is not TOML"),
        ("[store]\nram_bytes = '4G'", "store.ram_bytes (from x.toml): '4G' is not a size"),
        ("[store]\nram_bytes = 9223372036854775808", "store.ram_bytes (from x.toml): 92233"),
        ("[store]\nmax_kl = inf", "store.max_kl (from x.toml): inf is no number below 2**63"),
        ("[store]\nttl_s = nan", "store.ttl_s (from x.toml): nan is no number below 2**63"),
    ],
)
def test_mistakes_in_a_file(toml, words):
    with pytest.raises(UsageError) as caught:
        from_toml(FIELDS, toml, "x.toml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (
            "[engine]\nmax_batch = 'two'",
            "engine.max_batch (from x) takes a whole number, at least 1, at most 256, not 'two'",
        ),
        ("[engine]\nmodel = ['a']", "engine.model (from x) takes text"),
        ("[store]\nencrypt = 1", "store.encrypt (from x) takes true, false, not 1"),
        ("[store]\nram_bytes = -1", "store.ram_bytes (from x) takes a size, at least 0 B, not -1"),
        ("log_level = 'INFO'", "log_level (from x) takes debug, error, info, warning, not 'INFO'"),
        (
            "[gateway]\nallowed_origins = ['a']",
            "gateway.allowed_origins (from x) takes a list of text such as https://ui.example, not"
            " 'a'",
        ),
        ("[gateway]\napi_keys = 'bob:hash'", "gateway.api_keys (from x) takes a list"),
        ("[engine]\ntoken = 5", "engine.token (from x) takes text"),
        (
            "[[engines]]\nname = 'a'\n[[engines]]\nname = 'b'\nvllm.block_tokens = 7",
            "engines.vllm.block_tokens (from x) takes a whole number, at least 0, at most 1024, a"
            " multiple of 16, not 7",
        ),
        (
            "[gateway]\nkey_limits = 'foo'",
            "gateway: key_limits holds 'foo', which is no list of whole numbers such as"
            " requests_per_minute=60 ram_bytes=67108864",
        ),
        ("[gateway]\nadmin_address = 'h:70000'", "gateway: admin_address: 70000 is no port"),
        ("[gateway]\ntrusted_proxies = ['x']", "gateway: trusted_proxies: 'x' does not appear to"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused_with_what_the_setting_takes(toml, words):
    with pytest.raises(UsageError) as caught:
        resolve([from_toml(FIELDS, toml, "x")])
    assert str(caught.value).startswith(words)


def test_a_file_of_an_editor_that_marks_its_bytes(tmp_path):
    assert settings_of({}, "\ufeff[engine]\nmax_batch = 2", tmp_path).settings.engine.max_batch == 2


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "t.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"t\.toml is not text in UTF-8"):
        settings_of(config=tmp_path / "t.toml")


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError, match="belong together"):
        settings_of({"THERMOCLINE_CAPACITY__SESSIONS": "9"})


def test_an_assignment_must_be_one():
    for wrong in ("engine.max_batch", "=5"):
        with pytest.raises(UsageError, match="section.field=value"):
            settings_of(assignments=[wrong])
    with pytest.raises(UsageError, match=r"write a table \[\[engines\]\] for each, in a file"):
        settings_of(assignments=["engines=a"])


def test_every_setting_has_a_variable_and_every_flag_a_setting():
    assert variable_of("store.redis_url") == "THERMOCLINE_STORE__REDIS_URL"
    environ = {variable_of("engine.model"): "m"}
    assert from_environment(FIELDS, environ)["engine.model"].value == "m"
    assert set(FLAGS.values()) <= set(FIELDS.types)
    assert set(flat(Settings())) == set(FIELDS.types)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("store.redis_url", "redis://u:pw@h:1/0", "redis://u:***@h:1/0"),
        ("store.redis_url", "redis://:pw@h", "redis://:***@h"),
        ("store.redis_url", "redis://h/0?password=pw&db=1", "redis://h/0?password=***&db=1"),
        ("store.redis_url", "redis://h:1/0", "redis://h:1/0"),
        ("store.redis_url", "redis://u:p/w@h:1/0", "***"),
        ("gateway.api_keys", ("bob:" + "a" * 64,), ["bob:***"]),
        ("engine.model", "org/name", "org/name"),
        ("engine.token", "very secret", "***"),
        ("engine.token", "", ""),
    ],
)
def test_secrets_are_masked(name, value, expected):
    assert masked(name, value) == expected


def test_every_setting_is_documented():
    text = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
    assert [name for name in FIELDS.types if f"`{name}`" not in text] == []


def test_a_list_may_be_written_as_json():
    for text in ('["*"]', "*"):
        found = settings_of(assignments=[f"gateway.model_aliases={text}"])
        assert found.settings.gateway.model_aliases == ("*",)
    with pytest.raises(UsageError, match="JSON list of strings"):
        settings_of(assignments=["gateway.model_aliases=[*]"])


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("4GiB", 4 << 30),
        (" 1.5 GiB ", 3 << 29),
        ("2GB", 2 * 10**9),
        ("512 MiB", 512 << 20),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "4G", "-1", "1e9", "four GiB", "4 GiB more", "0x10", "４GiB"])
def test_text_that_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("250ms", 0.25)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10 minutes", "-3s", "nan", "inf"])
def test_text_that_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(0, 1 << 45))
def test_a_shown_size_can_be_read_back(nbytes):
    again = parse_bytes(show_bytes(nbytes))
    assert abs(again - nbytes) <= 0.05 * nbytes


def test_settings_are_shown_with_their_unit():
    assert shown("engine.hot_bytes", 3 << 29) == "1.5 GiB"
    assert shown("scheduler.idle_after_s", 600.0) == "10 m"
    assert shown("scheduler.idle_after_s", 65) == "65 s"
    assert shown("engine.max_batch", 8) == "8"
    assert shown("gateway.model_aliases", ("a", "b")) == "a, b"
    assert show_duration(0.5) == "0.5 s"
