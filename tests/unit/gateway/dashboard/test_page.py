"""The dashboard's page: its files, its policy and its libraries."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

import pytest

from docs.generators import page_libraries as libraries
from gateway.clients.table import CLIENTS
from gateway.dashboard.routes import FOLDER, page_files
from gateway.keys import generate_key
from tests.unit.gateway.in_process import App

SOURCES = sorted(x for x in FOLDER.rglob("*") if x.suffix in (".js", ".css", ".html"))
OURS = [x for x in SOURCES if x.parent.name != "vendor"]


def names(path: Path) -> str:
    return str(path.relative_to(FOLDER))


async def test_the_page_needs_no_key_and_names_its_files():
    app = App(api_keys=(generate_key("alice")[1],))
    page = await app.get("/ui")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-cache"
    named = re.findall(r'(?:href|src)="([^"]+)"', page.body.decode())
    assert len(named) > 3
    for url in named:
        found = await app.get(f"/{url}")
        assert found.status == 200, url
        assert "immutable" in found.headers["cache-control"]


@pytest.mark.parametrize("path", ["/ui", "/ui/{version}/app.js", "/ui/{version}/icon.svg"])
async def test_nothing_but_this_server_may_be_asked(path):
    path = path.format(version=page_files().version)
    headers = (await App().get(path)).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and ":" not in policy
    assert "frame-ancestors 'none'" in policy and headers["x-frame-options"] == "DENY"


async def test_a_page_that_the_browser_has_is_not_sent_again(app: App):
    first = await app.get("/ui")
    again = await app.get("/ui", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert (await app.get("/ui", if_none_match='"another"')).status == 200


async def test_packed_bytes_are_the_same_page(app: App):
    packed = await app.get("/ui", accept_encoding="gzip, br")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == (await app.get("/ui")).body


@pytest.mark.parametrize("name", ["", "nothing.js", "../routes.py", "..%2froutes.py", "index.html"])
async def test_only_the_pages_files_are_served(name):
    for path in (f"/ui/{page_files().version}/{name}", "/ui/0123456789abcdef/app.js"):
        assert (await App().get(path)).status == 404


async def test_browsers_are_led_to_the_page_and_programs_are_told_what_is_where(app: App):
    led = await app.get("/", accept="text/html,*/*;q=0.8")
    assert (led.status, led.headers["location"]) == (302, "ui")
    told = await app.get("/", accept="*/*")
    assert (told.status, told.json["dashboard"], told.json["api"]) == (200, "/ui", "/v1")
    for name in ("dashboard", "description", "ready", "metrics"):
        assert (await app.get(told.json[name])).status in (200, 503)  # none is ready here
    slash = await app.get("/ui/")
    assert (slash.status, slash.headers["location"]) == (308, "../ui")


def test_a_change_of_any_file_changes_every_address(tmp_path):
    same, other = (Path(shutil.copytree(FOLDER, tmp_path / x)) for x in ("same", "other"))
    style = other / "style" / "base.css"
    style.write_text(style.read_text() + "\n")
    assert page_files(same).version == page_files().version
    assert page_files(other).version != page_files().version


def test_libraries_are_the_pinned_ones_with_their_licences(tmp_path):
    libraries.check()
    assert {x.name for x in libraries.FOLDER.iterdir()} == {x.file for x in libraries.PARTS}
    licensed = {x.file.partition(".")[0] for x in libraries.PARTS if x.file.endswith(".LICENSE")}
    assert licensed == {"preact", "htm", "signals", "signals-core", "uplot"}
    copy = tmp_path / "vendor"
    shutil.copytree(libraries.FOLDER, copy)
    (copy / "htm.js").write_bytes((copy / "htm.js").read_bytes() + b" ")
    with pytest.raises(libraries.WrongBytes, match="htm.js"):
        libraries.check(copy)


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_every_import_leads_to_a_file(path):
    text = path.read_text()
    imports = re.findall(r'(?:from|import)\s*"([^"<>=]+)"', text) if path.suffix == ".js" else []
    for name in imports:
        assert name.startswith("."), f"{name} is no path"
        assert (path.parent / name).is_file(), name


@pytest.mark.parametrize("path", OURS, ids=names)
def test_our_own_files_are_short_and_ask_no_other_host(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert not re.search(r"(?:src|href|url|fetch|import)\W{1,3}https?:", text)
    assert "innerHTML" not in text and "dangerously" not in text and "eval(" not in text
    if path.suffix == ".js":
        assert text.startswith("// "), "a module begins with its purpose"


async def test_the_settings_of_every_client_are_written_for_the_server_that_is_named(app: App):
    said = await app.get("/ui/clients?url=http://box:1&model=m&key=none&context=4096")
    assert [x["id"] for x in said.json["data"]] == list(CLIENTS)
    assert all("http://box:1" in x["text"] for x in said.json["data"])
    assert any("first prompt of Claude Code" in y for x in said.json["data"] for y in x["notes"])
    for query in ("", "url=x&model=a%0Ab&key=k&context=1", "url=x&model=m&key=k&context=-1"):
        assert (await app.get(f"/ui/clients?{query}")).status == 400
