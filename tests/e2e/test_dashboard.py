"""A conversation's life on the dashboard, by clicks, with the real engine and no network."""

from __future__ import annotations

import re

import pytest

from benchmarks.stacks.product_stack import Stack
from tests.integration.dashboard.browser import Browser, chromium

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_real_chat_sleeps_comes_back_is_pinned_and_forgotten(sample_stack: Stack):
    with chromium() as launched:
        browser = Browser(launched, sample_stack.url, wait_ms=200_000)
        page = browser.open()
        page.get_by_role("tab", name="Chat").click()
        page.get_by_role("button", name=re.compile("^In one sentence")).click()
        page.get_by_role("button", name="Let it sleep").click()
        page.get_by_role("button", name="Wake").wait_for()
        page.get_by_label("Message").fill("And why does a swimmer notice it?")
        page.get_by_role("button", name="Send").click()
        talk = page.locator(".talk")
        talk.get_by_text("from RAM").wait_for()
        talk.get_by_text(re.compile(r"[1-9]\d* tokens not computed again")).first.wait_for()

        page.get_by_role("button", name="Show this session").click()
        side = page.get_by_role("complementary")
        side.get_by_role("img", name=re.compile("Packed RAM for .* then Hot for")).wait_for()
        side.get_by_role("img", name=re.compile("restored from RAM")).wait_for()
        side.get_by_role("button", name="Pin", exact=True).click()
        side.get_by_role("button", name="Unpin").click()
        side.get_by_role("button", name="Forget").click()
        side.get_by_role("button", name="Forget it").click()
        side.wait_for(state="detached")
        page.get_by_role("button", name=re.compile("^page-")).wait_for(state="hidden")
        browser.check()
