"""Imports point downward only, and light modules load nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_hk

PACKAGE = Path(fedjax_hk.__file__).parent

# From the bottom up; a part imports from itself and from parts before it only. All there are.
LAYERS = (
    "hk", "settings", "types", "keys", "parallel", "metrics", "data", "models", "tasks", "rules",
    "round", "store", "report", "integrations", "run", "main", "forecast", "compare",
)  # fmt: skip


def imported_parts(path: Path) -> set[str]:
    """Top-level parts of the package that a file imports, lazily or not."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = path.relative_to(PACKAGE).parts[: -node.level]
            module = (node.module or "").split(".") if node.module else []
            names = [".".join(("fedjax_hk", *base, *module, alias.name)) for alias in node.names]
        else:
            continue
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "fedjax_hk" and len(pieces) > 1:
                parts.add(pieces[1])
    return parts


def files_of(part: str) -> list[Path]:
    single = PACKAGE / f"{part}.py"
    return [single] if single.exists() else sorted((PACKAGE / part).rglob("*.py"))


def test_every_part_has_its_layer():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__"} == set(LAYERS)


@pytest.mark.parametrize("part", LAYERS)
def test_imports_point_downward(part):
    allowed = {*LAYERS[: LAYERS.index(part) + 1], "__version__"}
    assert files_of(part)
    for path in files_of(part):
        above = imported_parts(path) - allowed
        assert not above, f"{path.relative_to(PACKAGE)} imports {sorted(above)} from above"


def test_operator_imports_nothing_of_ours():
    for path in files_of("hk"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, path  # relative imports stay inside the folder
                assert node.level or node.module.split(".")[0] != "fedjax_hk", path
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "fedjax_hk" for alias in node.names), path


def test_operator_does_without_other_packages():
    allowed = {"jax", "numpy", *sys.stdlib_module_names}
    for path in files_of("hk"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] in allowed, path


LIGHT = (
    "fedjax_hk",
    "fedjax_hk.rules",
    *(
        f"fedjax_hk.settings.{path.stem}"
        for path in sorted((PACKAGE / "settings").glob("[!_]*.py"))
    ),
)


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_neither_jax_nor_numpy(module):
    code = (
        f"import sys, {module}\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'flax', 'optax', 'pandas', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
