"""Pages in a headless browser, on a phone and on a desk, light and dark."""

import os
import re
import shutil
import subprocess

import pytest
from made_run import HOSTILE, fleet_of, make_run

from fedjax_hk import compare
from fedjax_hk.report import build, load, page, pictures, plots
from fedjax_hk.settings.config import Config

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed (chromium on the PATH)"),
]

# A frame has the width of a phone where windows of the browser cannot be so narrow. What it
# holds is measured by a script of the frame's owner; the page itself has none.
FRAME = """<!DOCTYPE html><iframe id="f" src="{page}" style="width:{width}px;height:900px;border:0">
</iframe><script>
onload = () => {{
  const inside = document.getElementById("f").contentWindow, root = inside.document.documentElement;
  const wide = [...inside.document.querySelectorAll("p,h1,h2,h3,li,figure,.wide,svg")]
    .filter((one) => one.getBoundingClientRect().right > root.clientWidth + 1).length;
  const paper = inside.getComputedStyle(inside.document.body).backgroundColor;
  document.title = `measured ${{root.scrollWidth}} ${{root.clientWidth}} ${{wide}} ${{paper}}`;
}};
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report with all that takes no compiling, and a comparison; names that are too long."""
    base = tmp_path_factory.mktemp("pages")
    fleet = fleet_of()
    names = (HOSTILE, "a-very-long-name-of-a-meter-" * 5, *fleet.client_ids[2:])
    fleet = fleet._replace(client_ids=names)
    one = make_run(base / "one", fleet=fleet)
    two = make_run(base / "two", Config(agg="fedavg", rounds=2), fleet=fleet, seed=1)
    run = load.load_run(one)
    parts = (pictures._over_rounds, pictures._errors, pictures._forecasts, pictures._together)
    figures = [
        page.figure(plots.to_svg(one.figure, one.name), one.title, one.caption, one.alt)
        for part in parts
        for one in part(run)
    ]
    (base / "report.html").write_text(build.page_of(run, figures))
    compare.write_comparison([one, two], base)
    return base


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["report", "compare"])
def test_no_error_and_no_sideways_scrolling(pages, tmp_path, name, width, scheme):
    frame = pages / f"frame-{name}-{width}-{scheme}.html"
    frame.write_text(FRAME.format(page=f"{name}.html", width=width))
    dark = "0" if scheme == "dark" else "1"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, "--allow-file-access-from-files", "--window-size=1400,1000",
         f"--blink-settings=preferredColorScheme={dark}", f"--user-data-dir={tmp_path}",
         frame.as_uri()],
        capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert not console
    found = re.search(r"<title>measured (\d+) (\d+) (\d+) (rgb\([^)]*\))", done.stdout)
    assert found, done.stderr[-2000:]
    scroll, client, too_wide = (int(found.group(k)) for k in (1, 2, 3))
    assert client <= width and scroll <= client
    assert too_wide == 0
    assert found.group(4) == ("rgb(18, 24, 31)" if scheme == "dark" else "rgb(255, 255, 255)")
