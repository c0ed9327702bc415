"""Pages read well on the site: links lead somewhere, lists are lists, no other host is asked."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import FILES, tree_of

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!\!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```|`[^`\n]*`|<!--.*?-->", re.DOTALL | re.MULTILINE)
# A path in back quotes that begins with a folder of ours and ends like a file.
OUR_FILE = re.compile(
    r"`((?:gateway|scheduler|engines|kvstore|launch|tests|benchmarks|docs)/[\w./-]+\.(?:py|sh|md|toml))`"
)
# The name of a class in back quotes, perhaps with a method, or of a function with an underscore.
OUR_NAME = re.compile(r"`([A-Z][A-Z]*[a-z]\w*|_[a-z]\w*)(?:\.\w+)?`")
# References that a browser fetches by itself, without a click.
FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:)?//|"
    r"<link(?![^>]*rel=\"?canonical)[^>]*\shref=\"?(https?:)?//|@import|url\(\s*['\"]?(https?:)?//"
)


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_links_lead_somewhere():
    broken = [(names(x), link) for x in PAGES for link in links(x) if not leads_somewhere(x, link)]
    assert broken == []


def test_files_that_are_named_exist():
    """A path may leave out its first folders where the page has said which are meant."""
    named = {(names(page), x) for page in PAGES for x in OUR_FILE.findall(page.read_text("utf-8"))}
    architecture = ROOT / "docs" / "architecture.md"
    bare = re.findall(r"`(\w+\.(?:py|sh))`", architecture.read_text("utf-8"))
    assert bare
    named |= {(names(architecture), x) for x in bare}
    assert {x for x in named if not is_file(x[1])} == set()


@pytest.mark.share("sources")
def test_names_of_code_in_the_architecture_exist():
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {x.name for path in FILES for x in ast.walk(tree_of(path)) if isinstance(x, kinds)}
    named = set(OUR_NAME.findall((ROOT / "docs" / "architecture.md").read_text("utf-8")))
    assert len(named) > 10
    assert named - defined == set()


def test_lists_and_tables_have_an_empty_line_before_them():
    """Without it the site's Markdown takes them for a part of the paragraph, unlike GitHub's."""
    begun = r"^(?!- |\* |\d+\. |\s|\||#|<)(.+\n)(?:- |\* |\d+\. |\|)"
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        found += [(names(page), x) for x in re.findall(begun, text, re.MULTILINE)]
    assert found == []


def links(page: Path) -> Iterator[str]:
    text = FENCE.sub("", page.read_text("utf-8"))
    for found in LINK.finditer(text):
        yield found[1] or found[2]


def leads_somewhere(page: Path, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return True  # to another host, or mail: not asked for here
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return False
    return not anchor or anchor in anchors(target)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).strip().replace(" ", "-") for x in heads}


@cache
def all_files() -> list[str]:
    kinds = ("*.py", "*.sh", "*.md", "*.toml")
    rooms = (x for x in ROOT.iterdir() if x.is_dir() and not x.name.startswith("."))
    return [str(x.relative_to(ROOT)) for room in rooms for k in kinds for x in room.rglob(k)]


def is_file(path: str) -> bool:
    return any(x == path or x.endswith(f"/{path}") for x in all_files())


def test_the_site_is_whole_and_asks_no_other_host(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    shown = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]
    assert len(shown) > 20
    foreign = {
        f"{path.name}: {found[0]}"
        for path in shown
        if (found := FETCHED.search(path.read_text("utf-8"))) is not None
    }
    assert foreign == set()
