"""The view of models: loaded, unloaded, fetched from a hub, deleted; a tenant only reads."""

from __future__ import annotations

import re

import pytest

from tests.hub import MODEL, hub
from tests.integration.dashboard.browser import Browser, chromium
from tests.integration.dashboard.conftest import KEYS
from tests.integration.launch.test_several_models import start

pytestmark = pytest.mark.slow
TOML = """
[[engines]]
name = "first"
kind = "fake"
[[engines]]
name = "later"
kind = "fake"
load = "on-demand"
[[engines]]
name = "other"
kind = "fake"
load = "on-demand"
"""


@pytest.fixture(scope="module")
def fetching(tmp_path_factory):
    """A server with a model on demand, beside a hub on this machine."""
    pytest.importorskip("huggingface_hub")
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as environ, hub(folder / "hub", environ):
        running = start(folder, TOML)
        yield running
        running.stop()


@pytest.fixture(scope="module")
def browser(fetching):
    with chromium() as launched:
        yield Browser(launched, fetching.url)


def test_a_model_is_loaded_in_place_of_another_and_unloaded(browser):
    page = browser.open("models")
    row = page.get_by_role("region", name="Served models").get_by_role("row", name="later")
    row.get_by_role("cell", name="unloaded").wait_for()
    row.get_by_role("button", name="Load", exact=True).click()
    row.get_by_role("cell", name="loaded", exact=True).wait_for()
    other = page.get_by_role("region", name="Served models").get_by_role("row", name="other")
    other.get_by_role("button", name="Load", exact=True).click()
    other.get_by_text("Unload later for it?").wait_for()
    other.get_by_role("button", name="Load it").click()
    row.get_by_role("cell", name="unloaded", exact=True).wait_for()
    other.get_by_role("button", name="Unload").click()
    other.get_by_role("button", name="Load", exact=True).wait_for()
    first = page.get_by_role("row", name="first")
    assert first.get_by_role("button").count() == 0
    page.context.close()


def test_a_model_is_added_by_its_name_and_deleted_again(browser):
    page = browser.open("models")
    page.get_by_text(re.compile(r"None yet. .* are free")).wait_for()
    page.get_by_label("Name at the hub").fill("no-hub-id")
    page.get_by_role("button", name="Download").click()
    assert page.get_by_label("Name at the hub").evaluate("x => x.validity.patternMismatch")
    page.get_by_label("Name at the hub").fill(MODEL)
    page.get_by_role("button", name="Download").click()
    lines = page.get_by_label("Settings for this model", exact=True)
    lines.get_by_text('name = "model-1"').wait_for()
    row = page.get_by_role("region", name="Downloaded models").get_by_role("row", name=MODEL)
    row.get_by_text(re.compile(r"^256 KiB$")).wait_for()
    row.get_by_role("button", name="Delete").click()
    row.get_by_text(f"Delete {MODEL}? 256 KiB become free.").wait_for()
    row.get_by_role("button", name="Delete it").click()
    page.get_by_text("None yet.").wait_for()
    page.context.close()


def test_what_cannot_be_fetched_here_shows_the_command(browser):
    page = browser.open("models")
    page.get_by_label("Name at the hub").fill("unknown/model")
    page.get_by_role("button", name="Download").click()
    page.get_by_text("unknown/model was not downloaded here").wait_for()
    shown = page.get_by_label("The download as a command", exact=True)
    assert shown.inner_text() == "hf download unknown/model"
    page.context.close()


def test_a_tenant_reads_the_list_and_no_more(server, browser):
    page = Browser(browser._chromium, server.url).open("models", key=KEYS["alice"][0])
    page.get_by_role("cell", name="loaded").wait_for()
    view = page.get_by_role("tabpanel", name="Models")
    assert view.get_by_role("button").count() == 0
    assert view.get_by_role("heading").all_inner_texts() == ["Models"]
    page.context.close()
