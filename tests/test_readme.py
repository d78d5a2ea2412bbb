"""What the README shows is run as it stands there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def example(name: str) -> str:
    """The code block that follows `<!-- name -->`."""
    found = re.search(rf"<!-- {name} -->\s*```python\n(.*?)```", README, re.DOTALL)
    assert found, f"README has no block {name}"
    return found.group(1)


def test_hk_example_embeds_the_operator(capsys):
    code = example("hk-example")
    scope = {}
    exec(compile(code, "README", "exec"), scope)
    found = scope["found"]
    assert found.labels_s.tolist() == [0, 0, 2, 2, 4]
    assert bool(found.converged)
    assert "[0 0 2 2 4]" in capsys.readouterr().out
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 20


@pytest.mark.slow
def test_library_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(example("library-example"), "README", "exec"), scope)
    assert len(scope["outcome"].rounds) == 2
    assert "after 2 rounds" in capsys.readouterr().out


def test_flags_that_documents_name_exist():
    from fedjax_hk.main import define_flags

    known = set(define_flags()) | {"flagfile", "json", "rows", "repeats", "run"}
    known |= {"results", "picture"}  # of experiments
    # Command line options of other programs that the documents call.
    known |= {"no-deps", "durations", "run", "raw"}
    presets = [path.read_text() for path in (ROOT / "experiments/presets").glob("*.flags")]
    for text in [README, (ROOT / "BUILD_NOTES.md").read_text(), *presets]:
        for name in re.findall(r"(?<![\w-])--([a-z_]+)", text):
            assert name in known or name.removeprefix("no") in known, name


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments/presets").glob("*.flags")), ids=lambda path: path.name
)
def test_presets_are_accepted(path):
    from fedjax_hk.main import parse
    from fedjax_hk.settings import checks

    settings, given, _ = parse(["main", f"--flagfile={path}"])
    assert given
    checks.check(settings)
