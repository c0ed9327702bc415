"""What the dashboard costs: its reader's browser with many sessions, and the gateway.

    python benchmarks/dashboard.py [--sessions 10000] [--updates 10] [--json OUT]

The gateway is the real one, the engine a fake, the browser the system's Chromium. Painting: from
the page's request until its table shows rows, the snapshot of all sessions included. An update: CPU
time of the page's main thread for each second in which ``CHANGED`` sessions have a turn, on each
view, and its tasks of more than 50 ms. The gateway: its CPU time with 100 sessions that work a
little, with a page open and without, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from benchmarks.stacks.product_stack import prose, write_json

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AT_ONCE = 32
FEW = 100
FEW_TURNS = 5
CHANGED = 20  # sessions that have a turn in each second
VIEWS = ("now", "sessions", "memory", "sessions//s-00000")
PAINTED = """
new Promise(done => {
  const look = () => document.querySelector('.rows tbody th')
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now()))) : setTimeout(look, 5);
  look();
})
"""
# Every task that takes longer than a frame, from now on.
WATCH = """
() => { window.tasks = []; new PerformanceObserver(list =>
  window.tasks.push(...list.getEntries().map(x => x.duration))).observe({type: 'longtask'}); }
"""


async def fill(url: str, num_sessions: int) -> None:
    """Give every session a first turn."""
    numbers = iter(range(num_sessions))
    async with aiohttp.ClientSession() as http:

        async def some() -> None:
            for number in numbers:
                await turn(http, url, number)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def turn(http: aiohttp.ClientSession, url: str, number: int) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prose(number, 20)}],
        "max_tokens": 4,
    }
    headers = {"x-session-id": f"s-{number:05}"}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()


async def work(url: str, num_sessions: int, each_second: int, seconds: int) -> None:
    """Let some sessions have a turn, each second."""
    async with aiohttp.ClientSession() as http:
        for second in range(seconds):
            start = time.monotonic()
            for i in range(each_second):
                await turn(http, url, (second * each_second + i) % num_sessions)
            await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - start)))


def beside(page: Any, url: str, num_sessions: int, each_second: int, seconds: int) -> None:
    """Let sessions work while the page goes on; playwright's loop is that of this thread."""
    working = work(url, num_sessions, each_second, seconds)
    thread = threading.Thread(target=asyncio.run, args=(working,))
    thread.start()
    while thread.is_alive():
        page.wait_for_timeout(100)


def browse(chromium: Any, url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Paint and update times."""
    painted = []
    for _ in range(args.loads):
        page = chromium.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{url}/ui#sessions", wait_until="commit")
        painted.append(page.evaluate(PAINTED))
        if len(painted) < args.loads:
            page.close()
    rows = page.locator(".filters output").inner_text()
    updates = {}
    for view in VIEWS:
        page.evaluate("x => { location.hash = x }", view)
        page.wait_for_timeout(1500)
        updates[view.partition("//")[0] + (" opened" if "//" in view else "")] = watched(
            page, url, args
        )
    page.close()
    return {
        "rows": rows,
        "painted_ms": [round(x) for x in painted],
        "painted_best_ms": round(min(painted)),
        "update_main_thread_ms": updates,
    }


def watched(page: Any, url: str, args: argparse.Namespace) -> dict[str, float]:
    """Main-thread times of updates on the view that is open."""
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.evaluate(WATCH)
    before = busy(client)
    beside(page, url, args.sessions, CHANGED, args.updates)
    spent = busy(client) - before
    long = page.evaluate("() => window.tasks")
    return {
        "mean": round(1000 * spent / args.updates, 1),
        "longer_than_50": len(long),
        "longest_of_these": round(max(long), 1) if long else 0.0,
    }


def busy(client: Any) -> float:
    metrics = {x["name"]: x["value"] for x in client.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def gateways_share(chromium: Any, stack: FakeStack, args: argparse.Namespace) -> dict[str, Any]:
    """CPU of the gateway in percent of a core, with a page open and without."""
    shares: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * args.rounds):
        shown = number % 2 == 0
        page = chromium.new_page()
        page.goto(f"{stack.url}/ui#now" if shown else "about:blank")
        page.wait_for_timeout(2000)
        before, start = cpu_s(stack), time.monotonic()
        beside(page, stack.url, FEW, FEW_TURNS, args.seconds)
        shares[shown].append(100 * (cpu_s(stack) - before) / (time.monotonic() - start))
        page.close()
    means = {shown: statistics.mean(x) for shown, x in shares.items()}
    return {
        "with_page_pct": [round(x, 2) for x in shares[True]],
        "without_pct": [round(x, 2) for x in shares[False]],
        "page_costs_pct_of_a_core": round(means[True] - means[False], 2),
    }


def cpu_s(stack: FakeStack) -> float:
    times = stack.process.cpu_times()
    return float(times.user + times.system)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path is not None, "no chromium here"
    result: dict[str, Any] = {"sessions": args.sessions}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with FakeStack(Path(folder) / "many") as stack:
            filling = threading.Thread(target=asyncio.run, args=(fill(stack.url, args.sessions),))
            filling.start()
            filling.join()
            result["page"] = browse(chromium, stack.url, args)
        with FakeStack(Path(folder) / "few") as stack:
            filling = threading.Thread(target=asyncio.run, args=(fill(stack.url, FEW),))
            filling.start()
            filling.join()
            result["gateway"] = gateways_share(chromium, stack, args)
        chromium.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, run(args))


if __name__ == "__main__":
    main()
