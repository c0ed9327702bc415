"""A conversation's life by clicks: opened, asleep, back, pinned, forgotten; others' are hidden."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from benchmarks.stacks.fake_stack import MODEL
from tests.integration.dashboard.conftest import KEYS

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api").expect


def cell(page, name):
    """The strip's cell of a tier, once it counts ``one`` session or another number."""
    return page.get_by_role("region", name="Where conversations are").get_by_role(
        "button", name=re.compile(f"^{name}")
    )


def test_a_chat_is_opened_sleeps_comes_back_is_pinned_and_forgotten(server, browser):
    page = browser.open(key=KEYS["alice"][0])
    page.get_by_role("link", name="chat here").click()
    page.get_by_label("Message").fill("one two three")
    page.get_by_label("Message").press("Enter")
    page.get_by_text("You said: one two three").wait_for()
    cell(page, "Hot 1 session").wait_for()

    page.get_by_role("button", name="Let it sleep").click()
    cell(page, "Packed RAM 1 session").wait_for()
    page.get_by_role("button", name="Wake").wait_for()
    page.get_by_label("Message").fill("four five six")
    page.get_by_role("button", name="Send").click()
    page.locator(".talk").get_by_text("from RAM").wait_for()
    cell(page, "Hot 1 session").wait_for()
    page.get_by_role("tab", name="Now").click()
    page.get_by_role("term").filter(has_text="First token of a return").wait_for()
    page.get_by_role("tab", name="Chat").click()
    page.get_by_text("You said: one two three").wait_for()

    page.get_by_role("button", name="Show this session").click()
    side = page.get_by_role("complementary")
    side.get_by_role("heading", name=re.compile("^page-")).wait_for()
    side.get_by_role("button", name="Pin", exact=True).click()
    side.get_by_role("button", name="Unpin").wait_for()
    assert side.get_by_role("button", name="Let it sleep").is_disabled()
    side.get_by_role("button", name="Unpin").click()
    side.get_by_role("button", name="Let it sleep").click()
    side.get_by_role("button", name="Wake").wait_for()

    side.get_by_role("button", name="Forget").click()
    side.get_by_role("button", name="Keep it").click()
    side.get_by_role("button", name="Forget").click()
    side.get_by_role("button", name="Forget it").click()
    page.get_by_text("No conversations yet").first.wait_for()
    page.context.close()


def ask(page, question):
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")
    page.get_by_text(f"You said: {question}").wait_for()


def test_a_chat_ends_when_its_reader_signs_out(server, browser):
    page = browser.open("chat", key=KEYS["alice"][0])
    ask(page, "known to alice alone")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").fill(KEYS["bob"][0])
    page.get_by_role("button", name="Open").click()
    page.get_by_label("Message").wait_for()
    expect(page.get_by_text("known to alice alone")).to_have_count(0)
    ask(page, "of bob")
    page.context.close()


def test_a_question_without_an_answer_may_be_sent_again(server, browser):
    page = browser.open("chat", key=KEYS["alice"][0])
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_label("Message").fill("asked in vain")
    page.get_by_label("Message").press("Enter")
    page.get_by_role("alert").filter(has_text="does not answer").wait_for()
    expect(page.get_by_label("Message")).to_have_value("asked in vain")
    expect(page.locator(".talk li")).to_have_count(0)
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("You said: asked in vain").wait_for()
    page.context.close()


def test_the_latest_answer_of_a_long_chat_is_in_sight(server, browser):
    page = browser.open("chat", key=KEYS["alice"][0], viewport={"width": 390, "height": 700})
    for number in range(5):
        ask(page, f"number {number}")
    expect(page.get_by_text("You said: number 4")).to_be_in_viewport(ratio=1)
    page.context.close()


def test_steps_distinguish_a_wake_ahead_from_a_turn(server, browser):
    server.chat("alice", "woken-ahead", "one two three")
    server.post("alice", "/v1/sessions/woken-ahead/demote")
    page = browser.open("sessions//woken-ahead", key=KEYS["alice"][0])
    side = page.get_by_role("complementary")
    side.get_by_role("button", name="Wake").click()
    side.get_by_role("button", name="Let it sleep").wait_for()
    steps = side.get_by_role("region", name="Steps").get_by_role("listitem")
    steps.filter(has_text="is woken ahead of its next turn").wait_for()
    shown = [" ".join(x.split()[1:]) for x in steps.all_inner_texts()]
    assert shown[:2] == ["is back idle", "is woken ahead of its next turn waking"]
    assert shown[2].startswith("fell asleep, in Packed RAM")
    assert sum("the turn ended" in x for x in shown) == 1
    page.context.close()


def test_missed_means_a_return_that_found_nothing_wherever_it_stands(server, browser):
    key = KEYS["dora"][0]
    for session in ("went-on", "missed-it"):
        server.chat("dora", session, "one two three")
    server.chat("dora", "went-on", "one two three", "You said: one two three", "more")
    anew = [{"role": "system", "content": "be quick"}, {"role": "user", "content": "again"}]
    body = {"model": MODEL, "messages": anew}
    server.post("dora", "/v1/chat/completions", body, "missed-it")
    page = browser.open("sessions", key=key)
    strip = page.get_by_role("region", name="Where conversations are")
    strip.get_by_text("2 first turns").wait_for()
    missed = cell(page, "Missed 1 of 2 returns")
    missed.click()
    rows = page.get_by_role("region", name="Sessions").get_by_role("rowheader")
    expect(rows).to_have_text([re.compile("missed-it")])
    page.get_by_label("Last turn").select_option("first turn")
    page.get_by_text("No session is like that.").wait_for()
    page.get_by_role("tab", name="Memory").click()
    table = page.get_by_role("region", name="Where prompts came from").get_by_role("row")
    turns = {x.split()[0]: x.split("\t")[1] for x in table.all_inner_texts()[1:]}
    assert turns == {"hot": "1", "missed": "1", "first": "2"}
    page.context.close()


def test_the_line_of_an_empty_page_works_as_it_is_copied(server, browser):
    key = KEYS["erin"][0]
    page = browser.open(key=key, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy: The same by curl").click()
    page.get_by_text("Copied.").wait_for()
    line = page.evaluate("navigator.clipboard.readText()")
    assert key in line and key not in page.content()
    said = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, check=True)
    assert json.loads(said.stdout)["choices"][0]["message"]["content"] == "You said: Hello"
    page.get_by_role("button", name=re.compile("^Hot 1 session")).wait_for()
    page.context.close()


def test_another_tenant_sees_nothing_of_it(server, browser):
    server.chat("alice", "alices-secret-plan", "one two three")
    hers = browser.open("sessions", key=KEYS["alice"][0])
    hers.get_by_role("button", name="alices-secret-plan").wait_for()
    his = browser.open("sessions", key=KEYS["quiet"][0])
    his.get_by_text("No conversations yet").first.wait_for()
    for view in ("Now", "Sessions", "Chat", "Memory", "Quality", "Set-up"):
        his.get_by_role("tab", name=re.compile(f"^{view}")).click()
        his.get_by_role("tabpanel").first.wait_for()
        assert "alice" not in his.content(), view
    his.goto(f"{browser.url}/ui#sessions//alices-secret-plan")
    his.get_by_text("This session is gone").wait_for()
    for page in (hers, his):
        page.context.close()


def test_an_admin_sees_all_tenants_and_acts_on_their_sessions(server, browser):
    server.chat("bob", "of-bob", "one two three")
    server.chat("carol", "of-carol", "one two three")
    page = browser.open("now", key=KEYS["root"][0])
    tenants = page.get_by_role("region", name="All tenants").get_by_role("rowheader")
    tenants.filter(has_text="carol").wait_for()
    page.get_by_role("tab", name="Sessions").click()
    page.get_by_role("columnheader", name="Tenant").wait_for()
    page.get_by_role("button", name="of-carol").wait_for()
    page.get_by_role("button", name="of-bob").click()
    side = page.get_by_role("complementary")
    side.get_by_text("tenant bob").wait_for()
    side.get_by_role("button", name="Let it sleep").click()
    side.get_by_role("button", name="Wake").wait_for()
    page.get_by_role("tab", name="Set-up").click()
    page.get_by_role("heading", name="Findings").wait_for()
    page.get_by_role("heading", name="API keys").wait_for()
    for tenant, (key, line) in KEYS.items():
        assert key not in page.content() and line.split(":")[1] not in page.content(), tenant
    page.context.close()


def test_a_wrong_key_is_asked_for_again_and_a_right_one_stays_in_its_tab(server, browser):
    page = browser.open(key="tc-unknown")
    page.get_by_text("The API key is not valid here.").wait_for()
    page.get_by_label("API key").fill(KEYS["bob"][0])
    page.get_by_role("button", name="Open").click()
    page.get_by_role("tab", name="Sessions").wait_for()
    page.reload()
    page.get_by_role("tab", name="Sessions").wait_for()
    assert page.context.cookies() == []
    assert page.evaluate("Object.keys(localStorage)") == []
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
    assert page.evaluate("Object.keys(sessionStorage)") == []
    page.context.close()


def test_an_admin_sees_how_far_packing_again_has_come(server, browser):
    """The fake engine finds its stored sessions unpacked once it was measured."""
    for i in range(3):
        server.chat("erin", f"stored-{i}", "one two three")
    his = browser.open("memory", key=KEYS["root"][0])
    hers = browser.open("memory", key=KEYS["erin"][0])
    his.get_by_role("heading", name="Tiers against their budgets").wait_for()
    assert his.get_by_label("Packing again").count() == 0
    server.post("root", "/admin/measure")
    line = his.get_by_label("Packing again", exact=True)
    line.get_by_text("left to pack").wait_for()
    line.get_by_text(re.compile(r"sessions stored unpacked are packed now")).wait_for()
    line.get_by_text(re.compile(r"MiB freed so far")).wait_for()
    hers.get_by_role("heading", name="Tiers against their budgets").wait_for()
    assert hers.get_by_label("Packing again").count() == 0
    for page in (his, hers):
        page.context.close()
