"""A client's own settings keep all that they had."""

from __future__ import annotations

import io
import json
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gateway.clients.needs import NO_KEY, FileChange, Format, Server
from gateway.clients.table import CLIENTS, connection
from launch.cli.client_file import BACKUP_SUFFIX, merged, write
from launch.errors import LaunchError

# The others keep their settings in a database, or in a file with lists, and have lines to enter.
WITH_FILES = ["aider", "claude", "codex", "opencode", "qwen-code", "zed"]
SERVER = Server("http://127.0.0.1:8080", "org/model-1", 32768, "tc-key")


def change_of(client: str, home: Path, model: str = SERVER.model) -> FileChange:
    change = connection(client, replace(SERVER, model=model), home).change
    assert change is not None
    return change


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_the_shown_lines_name_address_model_and_key(client: str, tmp_path: Path) -> None:
    text = "\n".join(connection(client, SERVER, tmp_path).lines)
    assert "None" not in text
    for word in (SERVER.url, SERVER.model, SERVER.key):
        assert word in text


@pytest.mark.parametrize("client", WITH_FILES)
def test_a_file_that_is_not_there_is_made_private(client: str, tmp_path: Path) -> None:
    change = change_of(client, tmp_path)
    assert write(change) is None
    text = change.path.read_text()
    assert SERVER.model in text
    assert stat.S_IMODE(change.path.stat().st_mode) == 0o600
    assert write(change) is not None  # again: the same text
    assert change.path.read_text() == text


def test_codex_names_its_variable_only_where_there_is_a_key(tmp_path: Path) -> None:
    """It ends with "Missing environment variable" where one is named and not set."""
    keyed = connection("codex", SERVER, tmp_path)
    assert any("env_key" in x for x in keyed.lines) and keyed.notes
    keyless = connection("codex", replace(SERVER, key=NO_KEY), tmp_path)
    assert not any("KEY" in x or "env_key" in x for x in keyless.lines) and not keyless.notes
    assert keyed.change is not None and keyless.change is not None
    for change, named in [(keyless.change, False), (keyed.change, True), (keyless.change, False)]:
        write(change)
        provider = tomllib.loads(change.path.read_text())["model_providers"]["thermocline"]
        assert ("env_key" in provider) == named


@pytest.mark.parametrize(
    ("client", "tokens"),
    [("claude", "20,000"), ("qwen-code", "18,000"), ("opencode", "7,600"), ("codex", "6,400")],
)
def test_a_context_that_is_too_short_for_the_first_prompt_is_noted(client, tokens, tmp_path):
    notes = connection(client, replace(SERVER, max_context=4096), tmp_path).notes
    assert f"about {tokens} tokens, and this server's context is 4,096" in notes[-1]
    assert not any("context" in x for x in connection(client, SERVER, tmp_path).notes)


def test_lists_in_yaml_are_read_as_they_are_meant(tmp_path: Path) -> None:
    of_continue = yaml.safe_load("\n".join(connection("continue", SERVER, tmp_path).lines))
    (model,) = of_continue["models"]
    assert (model["model"], model["apiBase"]) == (SERVER.model, f"{SERVER.url}/v1")
    assert model["defaultCompletionOptions"] == {"contextLength": SERVER.max_context}
    named = replace(SERVER, model="模型 🙂")
    librechat = yaml.safe_load("\n".join(connection("librechat", named, tmp_path).lines))
    (endpoint,) = librechat["endpoints"]["custom"]
    assert endpoint["models"] == {"default": [named.model]}
    assert endpoint["headers"] == {"X-Session-ID": "{{LIBRECHAT_BODY_CONVERSATIONID}}"}


def test_open_webui_is_asked_to_name_its_chats(tmp_path: Path) -> None:
    lines = connection("open-webui", SERVER, tmp_path).lines
    assert connection("OpenWebUI", SERVER, tmp_path).lines == lines, "as it spells itself"
    assert "export ENABLE_FORWARD_USER_INFO_HEADERS='true'" in lines


def test_json_keeps_its_own_values(tmp_path: Path) -> None:
    change = change_of("claude", tmp_path)
    own = {"permissions": {"allow": ["Bash(ls)"]}, "env": {"MINE": "1", "ANTHROPIC_MODEL": "x"}}
    change.path.parent.mkdir()
    change.path.write_text(json.dumps(own))
    change.path.chmod(0o644)
    backup = write(change)
    assert json.loads(backup.read_text()) == own
    now = json.loads(change.path.read_text())
    assert now["permissions"] == own["permissions"]
    assert (now["env"]["MINE"], now["env"]["ANTHROPIC_MODEL"]) == ("1", SERVER.model)
    assert stat.S_IMODE(change.path.stat().st_mode) == 0o644
    write(change)
    assert json.loads(backup.read_text()) == own  # the first one stays


def test_toml_keeps_comments_and_tables(tmp_path: Path) -> None:
    own = (
        '# mine\nmodel = "o9"  # the best\napproval_policy = "never"\n\n'
        '[model_providers.other]\nname = "Other"\n\n[profiles.x]\nmodel = "y"\n'
    )
    change = change_of("codex", tmp_path)
    text = merged(own, change)
    assert "# mine" in text and "# the best" in text
    now = tomllib.loads(text)
    assert (now["model"], now["model_provider"]) == (SERVER.model, "thermocline")
    assert now["approval_policy"] == "never"
    assert now["model_providers"]["other"] == {"name": "Other"}
    assert now["model_providers"]["thermocline"]["wire_api"] == "responses"
    assert now["profiles"]["x"] == {"model": "y"}
    assert merged(text, change) == text


def test_lines_keep_their_neighbours(tmp_path: Path) -> None:
    change = change_of("qwen-code", tmp_path)
    text = merged("# mine\nexport OPENAI_MODEL=old\nOTHER=1\nOPENAI_MODEL_2=x", change)
    lines = text.splitlines()
    assert lines[:4] == ["# mine", f"OPENAI_MODEL={SERVER.model}", "OTHER=1", "OPENAI_MODEL_2=x"]
    assert sorted(lines[4:]) == [f"OPENAI_API_KEY={SERVER.key}", f"OPENAI_BASE_URL={SERVER.url}/v1"]


def test_yaml_keeps_what_is_below_other_keys(tmp_path: Path) -> None:
    change = change_of("aider", tmp_path)
    text = "---\n# mine\nread:\n- a\nnote: |\n  model: in a text\n\n'model' : old  # mine\n"
    found = yaml.safe_load(merged(text, change))
    assert found == {"read": ["a"], "note": "model: in a text\n", **change.values}


def test_of_lines_of_one_key_the_last_is_replaced(tmp_path: Path) -> None:
    dotenv = pytest.importorskip("dotenv")
    change = change_of("qwen-code", tmp_path)
    text = merged("OPENAI_MODEL=one\n  export OPENAI_MODEL=two\n", change)
    assert dotenv.dotenv_values(stream=io.StringIO(text)) == change.values


# Names of models that another server could give; each can be printed.
NAMES = [
    "org/model-1",
    "a b # no comment",
    "123",
    "true",
    "it's $HOME",
    'say "hi"',
    "a: b, [c] {d} & *e !f | > % @ `g`",
    "- x",
    "C:\\models\\new",
    "模型 🙂",
    "~",
]


@pytest.mark.parametrize("model", NAMES)
def test_a_parser_of_yaml_reads_back_what_aider_is_given(model: str, tmp_path: Path) -> None:
    needs = connection("aider", replace(SERVER, model=model), tmp_path)
    assert needs.change is not None
    text = merged("dark-mode: true\nmodel: old\n", needs.change)
    assert yaml.safe_load(text) == {"dark-mode": True, **needs.change.values}
    assert merged(text, needs.change) == text
    assert yaml.safe_load("\n".join(needs.lines)) == needs.change.values
    assert needs.change.values["model"] == f"openai/{model}"


@pytest.mark.parametrize("model", NAMES)
def test_a_parser_of_env_files_reads_back_what_qwen_code_is_given(model, tmp_path):
    dotenv = pytest.importorskip("dotenv")
    change = change_of("qwen-code", tmp_path, model)
    text = merged("MINE=1\nOPENAI_MODEL=old\n", change)
    found = dotenv.dotenv_values(stream=io.StringIO(text), interpolate=False)
    assert found == {"MINE": "1", **change.values}
    assert merged(text, change) == text


def test_a_name_that_readers_of_env_files_would_change_is_not_written(tmp_path: Path) -> None:
    for model in ('it\'s "so"', "a\\'b", "a${HOME}"):
        change = change_of("qwen-code", tmp_path, model)
        with pytest.raises(LaunchError, match="cannot be written"):
            write(change)
        assert not change.path.exists()


BAD_NAMES = [
    "m\ntest-cmd: touch /tmp/x",
    "m\rNODE_OPTIONS=--require=/tmp/x",
    "m\x1b]0;owned\x07",
    "m\x9b2J",
    "m\x00",
    "m\u2028x",
    "m\x85x",
    "",
]


@pytest.mark.parametrize("client", sorted(CLIENTS))
@pytest.mark.parametrize("model", BAD_NAMES)
def test_a_name_with_control_characters_is_refused(client: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="control characters") as refused:
        connection(client, replace(SERVER, model=model), tmp_path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("format", ["yaml", "lines"])
def test_a_value_with_a_line_break_is_never_written(format: Format, tmp_path: Path) -> None:
    """Not even one that comes from elsewhere, as a key does."""
    with pytest.raises(LaunchError):
        write(FileChange(tmp_path / "file", format, {"key": "a\nb: c"}))
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("client", "text"),
    [
        ("claude", "// comment\n{}"),
        ("claude", "[1]"),
        ("claude", '{"env": 3}'),
        ("codex", "model = "),
        ("codex", 'model_providers = "x"'),
        ("aider", "model:\n\n  old\nlint: true\n"),
        ("aider", "lint: true\nmodel: >-\n  old\n"),
        ("aider", "model: &m old\neditor-model: *m\n"),
        ("aider", "{model: old, lint: true}\n"),
        ("aider", "lint: true\n...\n"),
        ("aider", "lint: true\n---\nlint: false\n"),
        ("aider", "- a\n"),
        ("aider", "  lint: true\n"),
        ("aider", "a text\n"),
    ],
)
def test_a_file_that_cannot_be_merged_is_left_alone(client: str, text: str, tmp_path: Path) -> None:
    change = change_of(client, tmp_path)
    change.path.parent.mkdir(parents=True, exist_ok=True)
    change.path.write_text(text)
    with pytest.raises(LaunchError):
        write(change)
    assert change.path.read_text() == text
    assert not change.path.with_name(change.path.name + BACKUP_SUFFIX).exists()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.env"
    real.write_text("A=1\n")
    link = tmp_path / "link.env"
    link.symlink_to(real)
    write(FileChange(link, "lines", {"B": "2"}))
    assert link.is_symlink() and real.read_text() == "A=1\nB=2\n"


def test_an_unknown_client(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="claude"):
        connection("emacs", SERVER, tmp_path)
