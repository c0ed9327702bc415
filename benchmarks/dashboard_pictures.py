"""Takes pictures of the dashboard while a small team uses a real engine with the sample model.

    python benchmarks/dashboard_pictures.py [--out docs/pictures]

A few clients chat, fall asleep in memory, on disk and in Redis (where a redis-server is found), and
come back; one of them changes its own system message. Then the views are photographed, light and
dark. All figures in them are measured.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from benchmarks.program import arguments
from benchmarks.stacks.product_stack import MIB, Stack, prose
from tests.redis_server import RedisServer, find_binary

MODEL = "SmolLM2-135M-Instruct"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SYSTEM = "You help a small team with its warehouse. " + prose("system", 110)
SETTINGS: dict[str, dict[str, Any]] = {
    "engine": {"hot_bytes": 384 * MIB},
    "store": {"ram_bytes": 192 * MIB, "disk_bytes": 1024 * MIB},
    "scheduler": {"idle_after_s": 3600.0},
}
LONG = "invoice-import"  # the session whose journey is shown


class Speaker(NamedTuple):
    """A session, the client program, and the length of its first question."""

    id: str
    agent: str
    num_words: int
    parent: str = ""


SPEAKERS = (
    Speaker(LONG, "OpenAI/Python 2.9.0", 260),
    Speaker("refactor-stock", "claude-cli/2.1.0 (external, cli)", 320),
    Speaker("refactor-stock/tests", "claude-cli/2.1.0 (external, cli)", 120, "refactor-stock"),
    Speaker("parcel-labels", "codex_cli_rs/0.98.0", 220),
    Speaker("mira@chat", "Open-WebUI/0.9", 90),
    Speaker("jonas@chat", "Open-WebUI/0.9", 140),
    Speaker("night-report", "OpenAI/Python 2.9.0", 180),
    Speaker("returns-desk", "opencode/1.4.2", 200),
)


class Team:
    """Chats with the server, one after the other."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._said: dict[str, list[dict[str, str]]] = {}

    def say(self, who: Speaker, words: str, system: str = SYSTEM, answer: int = 12) -> None:
        talk = self._said.setdefault(who.id, [{"role": "system", "content": system}])
        talk[0] = {"role": "system", "content": system}
        talk.append({"role": "user", "content": words})
        body = {"model": MODEL, "messages": talk, "max_tokens": answer, "stream": True}
        body |= {"temperature": 0, "stream_options": {"include_usage": True}}
        headers = {"x-session-id": who.id, "user-agent": who.agent}
        headers |= {"x-parent-session-id": who.parent} if who.parent else {}
        text = ""
        for line in self._post("/v1/chat/completions", body, headers).splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
        talk.append({"role": "assistant", "content": text})

    def sleep(self, who: Speaker, tier: str = "") -> None:
        body = {"tier": tier} if tier else {}
        for attempt in itertools.count(1):  # its cold copy is written after the turn
            try:
                row = json.loads(self._post(f"/v1/sessions/{quote(who.id, safe='')}/demote", body))
                if row["state"] == "cold" and row["tier"] == (tier or row["tier"]):
                    return
            except urllib.error.HTTPError as error:
                if error.code != 409:
                    raise
            if attempt == 80:
                raise TimeoutError(f"{who.id} does not sleep")
            time.sleep(0.25)

    def pin(self, who: Speaker) -> None:
        self._post(f"/v1/sessions/{quote(who.id, safe='')}/pin", {})

    def _post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> str:
        own = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), own)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())


def day(team: Team, slowest: str) -> None:
    """Run the team's chats; ``slowest`` is the slowest tier that there is."""
    first, *others = SPEAKERS
    refactor, tests, parcels, mira, jonas, night, desk = others
    monday = SYSTEM + " Today is Monday."
    team.say(first, prose(first.id, first.num_words))
    team.sleep(first)
    for who in others:
        team.say(who, prose(who.id, who.num_words))
    team.say(first, "And what does it cost? " + prose("a", 40))
    for who, tier in ((first, "disk"), (parcels, ""), (jonas, "disk"), (night, slowest)):
        team.sleep(who, tier)
    team.say(first, "Sum it up. " + prose("b", 30))
    team.say(first, "Shorter. " + prose("c", 12))
    team.sleep(first, slowest)
    team.say(first, "Again, please. " + prose("d", 20), system=monday)
    team.say(parcels, "Now as a table. " + prose("e", 30))
    team.say(mira, "Thanks! " + prose("f", 20))
    for who, tier in ((mira, ""), (tests, "disk"), (desk, "disk")):
        team.sleep(who, tier)
    team.say(first, "Last one. " + prose("g", 40), system=monday)
    team.pin(refactor)
    team.say(parcels, "One more row. " + prose("h", 16))


def photograph(chromium: Any, stack: Stack, out: Path, slowest: str) -> None:
    team, pool = Team(stack.url), ThreadPoolExecutor()
    page = chromium.new_page(viewport={"width": 1440, "height": 900})

    def until(*working: Future[None]) -> None:
        """Wait for work on other threads while the page keeps running."""
        while not all(x.done() for x in working):
            page.wait_for_timeout(100)
        for done in working:
            done.result()

    def shoot(name: str, *, whole: bool = False) -> None:
        for shade in ("light", "dark"):
            page.emulate_media(color_scheme=shade)
            page.wait_for_timeout(300)
            page.screenshot(path=out / f"dashboard-{name}-{shade}.png", full_page=whole)

    page.goto(f"{stack.url}/ui")
    until(pool.submit(day, team, slowest))
    page.wait_for_timeout(2500)
    # Several at once, since any of them may end soon.
    speakers = (SPEAKERS[1], SPEAKERS[3], SPEAKERS[4])
    busy = [pool.submit(team.say, x, prose(x.id, 60), answer=60) for x in speakers]
    page.get_by_role("cell", name="answering").wait_for()
    shoot("now")
    until(*busy)
    for view in (f"sessions//{LONG}", "memory", "quality"):
        page.evaluate("x => { location.hash = x }", view)
        page.wait_for_timeout(1500)
        name = view.partition("/")[0]
        shoot(name, whole=name != "sessions")
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("x => { location.hash = x }", f"sessions//{LONG}")
    page.wait_for_timeout(1000)
    page.screenshot(path=out / "dashboard-phone-dark.png")


def main() -> None:
    from playwright.sync_api import sync_playwright

    args = arguments(__doc__, "--out docs/pictures --data PATH")
    out, slowest = Path(args.out), "disk"
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if find_binary():
            slowest = "redis"
            bounded = ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
            SETTINGS["store"]["redis_url"] = stack.enter_context(RedisServer(*bounded)).url
        if args.data:
            SETTINGS["store"] |= {"codec": "auto", "accept_loss": False}
        server = stack.enter_context(Stack(SETTINGS, folder=args.data))
        path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
        playwright = stack.enter_context(sync_playwright())
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        photograph(chromium, server, out, slowest)
        chromium.close()


if __name__ == "__main__":
    main()
