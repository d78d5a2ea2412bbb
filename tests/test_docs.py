"""What the guides show is run as it stands there, and every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fedjax_hk.settings import choices
from fedjax_hk.settings.page import settings_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "BUILD_NOTES.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(slow: bool):
    """Blocks that follow `<!-- example -->`, or `<!-- slow example -->`."""
    mark = "slow example" if slow else "example"
    for page in PAGES:
        found = re.findall(rf"<!-- {mark} -->\s*```python\n(.*?)```", page.read_text(), re.S)
        for number, code in enumerate(found):
            yield pytest.param(code, id=f"{page.stem}-{number}")


def assert_said(code: str, out: str) -> None:
    """What a comment beside a print promises."""
    for line in re.findall(r"print\(.*# (\[.*?\])", code):
        assert line in out


@pytest.mark.parametrize("code", list(examples(slow=False)))
def test_examples_run(code, capsys, monkeypatch):
    module = types.ModuleType("__main__")  # as if it were a user's script
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(choices, "GROUPINGS", dict(choices.GROUPINGS))
    monkeypatch.setitem(choices.TABLES, "grouping", choices.GROUPINGS)
    exec(compile(code, "example", "exec"), module.__dict__)
    assert_said(code, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("code", list(examples(slow=True)))
def test_examples_run_in_a_process_of_their_own(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert_said(code, done.stdout)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_guide_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_settings_page_is_what_the_settings_say():
    # python -m fedjax_hk.settings.page > docs/settings.md
    assert (ROOT / "docs/settings.md").read_text() == settings_page()


FILES = re.compile(
    r"`((?:fedjax_hk|rules|round|run|store|report|settings|models|tasks|data|hk|tests|experiments|docs)/[\w/]+\.\w+)`"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    for name in FILES.findall(page.read_text()):
        assert (ROOT / name).exists() or (ROOT / "fedjax_hk" / name).exists(), name
