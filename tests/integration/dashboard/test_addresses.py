"""Addresses that a user typed, cut or made up: the page shows what it can and stays in use."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.integration.dashboard.conftest import KEYS

pytestmark = pytest.mark.slow
ODD_IDS = ("a//b/", "%2e%2E", "100%/done", "käse?q#f", "<b>bold</b>")


@pytest.mark.parametrize(
    "address", ["%", "sessions/%E0%A4%A", "sessions//%zz", "sessions/%/%", "nothing/at/all", "////"]
)
def test_a_malformed_address_leaves_a_page_that_works(browser, address):
    page = browser.open(address, key=KEYS["carol"][0])
    page.get_by_role("tab", name="Memory").click()
    page.get_by_role("tabpanel", name="Memory").wait_for()
    page.evaluate("x => { location.hash = x }", address)
    page.get_by_role("tab", name="Set-up").click()
    page.get_by_role("tabpanel", name="Set-up").wait_for()
    page.context.close()


@pytest.mark.parametrize("session", ODD_IDS)
def test_a_session_of_any_id_is_opened_by_its_address_and_forgotten(server, browser, session):
    server.chat("carol", quote(session, safe=""), "one two three")
    page = browser.open(f"sessions//{quote(session, safe='')}", key=KEYS["carol"][0])
    side = page.get_by_role("complementary")
    side.get_by_role("heading", name=session, exact=True).wait_for()
    side.get_by_role("heading", name="Last turns").wait_for()
    side.get_by_role("button", name="Forget").click()
    side.get_by_role("button", name="Forget it").click()
    page.get_by_text(f"{session} is forgotten").wait_for()
    page.context.close()


def test_slashes_of_an_id_may_stand_in_an_address_as_they_are(server, browser):
    server.chat("carol", "team/of/three", "one two three")
    page = browser.open("sessions//team/of/three", key=KEYS["carol"][0])
    page.get_by_role("complementary").get_by_text("reused hot").wait_for()
    page.context.close()


def test_the_description_of_the_api_is_drawn_under_its_policy(browser):
    page = browser.blank()
    page.goto(f"{browser.url}/docs")
    page.get_by_text("POST /v1/chat/completions", exact=True).click()
    page.locator("details[open]").get_by_text('"properties"').wait_for()
    assert page.evaluate("getComputedStyle(document.querySelector('summary')).cursor") == "pointer"
    page.context.close()


def test_another_page_cannot_frame_the_description(browser):
    page = browser.blank()
    with page.expect_console_message(lambda message: "frame-ancestors" in message.text):
        page.set_content(f"<iframe src='{browser.url}/docs'></iframe>")
    browser.broken.clear()  # the refusal
    page.context.close()
