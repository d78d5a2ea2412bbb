"""What a user imports: all there, loaded when asked for, and named once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_hk


@pytest.mark.parametrize("name", fedjax_hk.__all__)
def test_every_public_name_is_there(name):
    assert getattr(fedjax_hk, name) is not None
    assert name in dir(fedjax_hk)


def test_names_are_said_alike_for_people_and_for_type_checkers():
    lazy = {*fedjax_hk._PUBLIC, *fedjax_hk._FOLDERS}
    assert {*fedjax_hk.__all__} == {*lazy, "__version__"}
    tree = ast.parse(Path(fedjax_hk.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    found = {alias.name: node.module for node in typed.body for alias in node.names}
    assert set(found) == lazy
    for name, module in fedjax_hk._PUBLIC.items():
        assert found[name] == f"fedjax_hk.{module}"


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="'fedjax_hk' has no attribute 'hks'"):
        _ = fedjax_hk.hks


def test_tab_completion_loads_nothing():
    code = (
        "import sys, fedjax_hk\n"
        "assert 'simulate' in dir(fedjax_hk)\n"
        "assert not {'jax', 'numpy', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_users_script_uses_public_names_alone():
    tree = ast.parse((Path(__file__).parent / "typed_user.py").read_text())
    compile(tree, "typed_user.py", "exec")
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "fedjax_hk"
    }
    assert used and used <= {*fedjax_hk.__all__}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "fedjax_hk":
            assert {alias.name for alias in node.names} <= {*fedjax_hk.__all__}
        elif isinstance(node, ast.ImportFrom):
            assert not node.module.startswith("fedjax_hk")
