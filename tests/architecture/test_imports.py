"""Which modules may import which, and which must stay out of the gateway's process."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, tree_of

# The modules of codecs that code without a codec may load: names, seams and profiles.
LIGHT_CODECS = {
    f"kvstore.codecs{name}"
    for name in (
        "",
        *(".base", ".floats", ".names", ".presets", ".profile", ".quality", ".reader"),
        *(".catalogue", ".registration", ".session_codec", ".states"),
        *(".rows", ".rows.packed_layout"),
    )
}
HEAVY = ("mlx", "mlx_lm", "vllm", "torch", "transformers", "numba", "huggingface_hub", "gguf")


def test_imports_go_one_way():
    program = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert program, "import-linter is not installed; run: bash launch/install.sh test"
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_the_control_plane_stays_light():
    loaded = loaded_by("launch.cli.main, launch.serve.run, launch.cli.plan, launch.doctor")
    assert "gateway.app" in loaded and not loaded & {*HEAVY}


def test_help_needs_neither_the_server_nor_the_http_client():
    assert not loaded_by("launch.cli.main") & {"fastapi", "aiohttp", "numpy"}


def test_what_the_command_line_does_compiles_nothing(tmp_path):
    """So it needs no private folder for that, as engines do (decision 56)."""
    config = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 99}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from launch.cli.main import app\n"
        "for words in (['plan', sys.argv[1]], ['plan', '--machines', sys.argv[1]],\n"
        "              ['doctor', '--model', sys.argv[1], '--set', 'engine.kind=mlx']):\n"
        "    print(CliRunner().invoke(app, words).output, file=sys.stderr)\n"
        "print(*sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert "what each codec would take" in done.stderr and "for this user alone" in done.stderr
    assert not set(done.stdout.split()) & {*HEAVY, "llvmlite"}


def test_the_gateway_process_imports_no_codec_before_one_is_chosen():
    loaded = {name for name in loaded_by("launch.serve.run") if name.startswith("kvstore.codecs")}
    assert loaded <= LIGHT_CODECS


def test_the_table_of_codec_names_imports_nothing():
    loaded = loaded_by("kvstore.codecs.names")
    ours = {name for name in loaded if name.startswith(("kvstore", "engines", "launch"))}
    table = {"kvstore.codecs.names", "kvstore.codecs.catalogue", "kvstore.errors"}
    assert ours == {"kvstore", "kvstore.codecs", *table}
    assert not loaded & {"numpy", "msgspec"}


def loaded_by(module: str) -> set[str]:
    """Everything in ``sys.modules`` of a fresh process that imports ``module``."""
    code = f"import sys, {module}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


pytestmark = pytest.mark.share("sources")


def modules_of(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_in(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imports_in(other)
        else:
            yield from imports_in(child)


def names_in(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yields names that may be modules, the longest first."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        for alias in node.names:
            yield f"{node.module}.{alias.name}"
        yield str(node.module)


def graph_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    graph = {}
    for name, path in modules.items():
        targets = {x for node in imports_in(tree_of(path)) for x in names_in(node)}
        graph[name] = {x for x in targets if x in modules and x != name}
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, sorted; none if there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted({*error.args[1]})
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_way_of_others(package):
    assert cycle_in(graph_of(modules_of(ROOT, (package,)))) == []


def test_cycles_are_found(tmp_path):
    folder = tmp_path / "room"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text("from room import b\n")
    (folder / "b.py").write_text("def later():\n    from room.c import x\n")
    (folder / "c.py").write_text("import room.a\nx = 1\n")
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.e import y\n"
    (folder / "d.py").write_text(typed)
    (folder / "e.py").write_text("from room import d\ny = 1\n")
    found = cycle_in(graph_of(modules_of(tmp_path, ("room",))))
    assert found == ["room.a", "room.b", "room.c"]
