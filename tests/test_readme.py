"""Flags and presets that documents name exist, and the set-up commands are single lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedjax_hk.settings import checks
from fedjax_hk.settings.flags import define_flags, parse

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PRESETS = sorted((ROOT / "experiments/presets").glob("*.flags"))
DOCUMENTS = [
    ROOT / "README.md", ROOT / "BUILD_NOTES.md", *sorted((ROOT / "docs").glob("*.md")), *PRESETS,
]  # fmt: skip


def defined_in(path: Path) -> set[str]:
    """Flags that a script or a command defines for itself."""
    return set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', path.read_text()))


def flags_of(command: str) -> set[str] | None:
    """Flags that the command of a line takes; None for a command of somebody else's."""
    if found := re.search(r"experiments/(\w+)\.py", command):
        return defined_in(ROOT / "experiments" / f"{found[1]}.py")
    if found := re.search(r"-m fedjax_hk\.(\w+)", command):
        return MAIN if found[1] == "main" else OF_DOORS
    return (
        None if re.search(r"\bpip\b|\bpytest\b|\bpython3 -m venv\b", command) else MAIN | OF_DOORS
    )


MAIN = {*define_flags(), "flagfile"}
OF_DOORS = {"run", "data", "data_format", "output"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_flags_that_documents_name_exist(path):
    text = path.read_text().replace("\\\n", " ")  # a command over several lines is one
    for line in text.splitlines():
        known = flags_of(line)
        for name in re.findall(r"(?<![\w-])--([a-z_]+)", line) if known is not None else ():
            assert name in known or name.removeprefix("no") in known, line


def test_doors_take_the_flags_that_they_are_shown_with():
    for door in ("forecast.py", "compare.py", "report/__main__.py"):
        text = (ROOT / "fedjax_hk" / door).read_text()
        assert any(f'"{name}"' in text for name in OF_DOORS), door


@pytest.mark.parametrize("name", ["run-command", "test-command"])
def test_set_up_is_one_line_to_paste(name):
    block = re.search(rf"<!-- {name} -->\s*```\n(.*?)```", README, re.S)[1]
    assert block.count("\n") == 1 and block.count(" && ") == 2


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_presets_are_accepted(path):
    settings, given, _ = parse(["main", f"--flagfile={path}"])
    assert given
    checks.check(settings)
