"""The page by keyboard, by screen reader, narrow and wide, light and dark."""

from __future__ import annotations

import re

import pytest

from gateway.clients.needs import Server as Connected
from gateway.clients.table import CLIENTS, connection
from tests.integration.dashboard.conftest import KEYS

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api").expect
VIEWS = ("now", "sessions", "chat", "memory", "quality", "models", "setup")
NUM_SESSIONS = 60


@pytest.fixture(scope="module")
def full(server):
    """A server with sessions, some of them asleep."""
    for i in range(NUM_SESSIONS):
        server.chat("carol", f"work-{i:02}", f"number {i} " + "word " * i)
        if i % 3 == 0:
            server.post("carol", f"/v1/sessions/work-{i:02}/demote")
    return server


@pytest.fixture
def page(full, browser):
    opened = browser.open("sessions", key=KEYS["carol"][0], viewport={"width": 1280, "height": 800})
    opened.get_by_role("button", name="work-59").wait_for()
    yield opened
    opened.context.close()


@pytest.mark.parametrize("shade", ["light", "dark"])
def test_axe_has_no_findings(page, shade):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page.emulate_media(color_scheme=shade, reduced_motion="reduce")
    places = [*VIEWS, "sessions//work-03"]
    for place in places:
        page.evaluate("x => { location.hash = x }", place)
        page.get_by_role("tabpanel").first.wait_for()
        if "work" in place:
            page.get_by_role("heading", name="Last turns").wait_for()
        found = axe.run(page).response["violations"]
        named = [(x["id"], x["help"], [y["html"][:200] for y in x["nodes"]]) for x in found]
        assert named == [], place


@pytest.mark.parametrize("width", [320, 768])
def test_names_have_room_where_columns_are_left_out(page, width):
    page.set_viewport_size({"width": width, "height": 700})
    name = page.locator(".rows tbody tr:not(.gap) th").first
    assert name.bounding_box()["width"] > 60


@pytest.mark.parametrize("width", [320, 768, 1280, 2560])
def test_no_view_is_wider_than_the_window(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    for place in [*VIEWS, "sessions//work-03"]:
        page.evaluate("x => { location.hash = x }", place)
        page.get_by_role("tabpanel").first.wait_for()
        widest = page.evaluate("document.scrollingElement.scrollWidth")
        assert widest <= width, place


def test_the_table_says_its_order_and_walks_by_arrows(page):
    idle = page.get_by_role("columnheader", name="Idle")
    assert idle.get_attribute("aria-sort") == "ascending"
    tokens = page.get_by_role("columnheader", name="Tokens")
    tokens.get_by_role("button").click()
    assert tokens.get_attribute("aria-sort") == "descending"
    assert idle.get_attribute("aria-sort") == "none"

    first = page.get_by_role("button", name="work-59")
    first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("button", name="work-58")).to_be_focused()
    page.keyboard.press("End")
    expect(page.get_by_role("button", name="work-00")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("complementary").get_by_role("heading", name="work-00").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("complementary").wait_for(state="detached")


def test_tabs_are_one_stop_and_arrows_walk_between_them(page):
    page.get_by_role("tab", name="Sessions").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Chat")).to_be_focused()
    chosen = page.get_by_role("tablist", name="Views").locator("[tabindex='0']")
    assert chosen.count() == 1
    assert chosen.get_attribute("aria-selected") == "true"


def test_filters_leave_what_they_name(page):
    said = page.locator(".filters output")
    expect(said).to_have_text("60")
    page.get_by_role("button", name=re.compile("^Packed RAM")).click()
    expect(said).to_have_text("20 of 60")
    page.get_by_role("searchbox").fill("work-0")
    expect(said).to_have_text("4 of 60")
    page.get_by_role("searchbox").fill("nothing like that")
    page.get_by_role("button", name="Show all").click()
    expect(said).to_have_text("60")


@pytest.mark.parametrize("client", CLIENTS)
def test_the_lines_for_clients_are_those_of_the_command(page, tmp_path, client):
    page.evaluate("location.hash = 'setup'")
    name = CLIENTS[client].name
    page.get_by_role("tab", name=name, exact=True).click()
    shown = page.get_by_label(f"Lines for {name}", exact=True).inner_text()
    connected = Connected(page.url.partition("/ui")[0], "fake-1", 32768, "YOUR-KEY")
    assert shown.strip().splitlines() == connection(client, connected, tmp_path).lines
