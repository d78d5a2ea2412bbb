"""The report of a run folder: what it says, what it draws, what it survives."""

import dataclasses
import html
import html.parser
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree

import numpy as np
import pandas as pd
import pytest
from made_run import CLIENTS, HOSTILE, classes_of, fleet_of, make_run

from fedjax_hk.report import __main__ as door
from fedjax_hk.report import build, load, numbers, page, pictures, plots
from fedjax_hk.settings.config import Config
from fedjax_hk.store.run_folder import RunFolder, RunFolderError
from fedjax_hk.tasks import forecast_errors
from fedjax_hk.types import Excluded

ALL = [
    "error_per_round", "accuracy_per_round", "errors_against_naive", "forecasts", "trajectories",
    "coalition_map", "dissimilarity", "together",
]  # fmt: skip


class Page(html.parser.HTMLParser):
    """Tags with attributes, and text, of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.words = [], []
        self.source = path.read_text()
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a report; names and reasons in it try to become markup or formulas."""
    fleet = fleet_of()
    names = (HOSTILE, *fleet.client_ids[1:])
    left = (Excluded("<b>bold</b>", "no reading & <i>nothing</i>"),)
    fleet = fleet._replace(client_ids=names, excluded=left, source="fleet <u>underlined</u>")
    path = make_run(tmp_path_factory.mktemp("whole") / "run", fleet=fleet)
    build.write_report(path)
    return path


def test_page_needs_nothing_but_itself(whole):
    found = Page(whole / "report.html")
    assert len(found.source) < 3e6
    assert not found.all("script") and not found.all("img") and not found.all("object")
    for tag, attrs in found.tags:
        assert not any(name.startswith("on") for name in attrs), tag
        for name in ("src", "href", "xlink:href", "data"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
    assert "@import" not in found.source and "url(http" not in found.source
    (viewport,) = (one for one in found.all("meta") if one.get("name") == "viewport")
    assert "width=device-width" in viewport["content"]
    assert "prefers-color-scheme: dark" in found.source
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_names_do_not_become_markup(whole):
    found = Page(whole / "report.html")
    assert not found.all("b") and not found.all("i") and not found.all("u")
    assert "<b>bold</b>" in found.text and "no reading & <i>nothing</i>" in found.text
    assert "fleet <u>underlined</u>" in found.text
    assert HOSTILE in found.text  # whole in the lists, cut short in pictures
    assert "<script" not in found.source
    for file in (whole / "pictures").glob("*.svg"):
        ElementTree.parse(file)


def test_every_picture_is_there_with_words(whole):
    found = Page(whole / "report.html")
    drawn = [attrs for attrs in found.all("svg") if "aria-label" in attrs]
    assert len(drawn) == len(ALL) and all(len(one["aria-label"]) > 30 for one in drawn)
    assert all(one["role"] == "img" for one in drawn)
    files = sorted(file.name for file in (whole / "pictures").iterdir())
    assert files == sorted(f"{name}.{kind}" for name in ALL for kind in ("png", "svg"))
    assert all(file.stat().st_size > 3000 for file in (whole / "pictures").iterdir())
    assert plots.INK not in found.source.replace(
        page._STYLE, ""
    )  # the page's own color, in light and dark


def test_report_says_what_the_summary_says(whole):
    found = Page(whole / "report.html")
    summary = re.sub(r"\s+", " ", (whole / "summary.txt").read_text())
    for sentence in re.findall(
        r"The model [^;]*;|Coalitions a round[^;]*;|Too few[^.]*\.|Error by round[^;]*;", summary
    ):
        assert sentence in found.text
    assert "95 % interval over clients" in found.text
    for heading in ("What was run", "Errors", "Coalitions", "Isolated clients", "Left out",
                    "What to try next", "Pictures", "Settings"):  # fmt: skip
        assert heading in found.text
    assert "h0007" in found.text and "2 of 2" in found.text  # the isolated one
    assert "--opinion" in found.text


def test_report_depends_on_the_folder_alone(whole):
    """Made again, what takes no compiling has the same bytes."""
    run = load.load_run(whole)
    for one in (
        *pictures._over_rounds(run),
        *pictures._errors(run, run.clients),
        *pictures._together(run),
    ):
        svg = plots.to_svg(one.figure, one.name)
        stored = (whole / "pictures" / f"{one.name}.svg").read_text()
        assert stored == svg.replace("<svg ", '<svg style="background:#fff" ', 1)


def quick(path, **options):
    """The page without the pictures that take compiling."""
    run = load.load_run(make_run(path, **options))
    return run, html.unescape(re.sub(r"<[^>]*>", " ", build.page_of(run, [])))


@pytest.mark.parametrize("agg", ["fedavg", "local"])
def test_rules_without_coalitions(tmp_path, agg):
    run, text = quick(tmp_path / "run", config=Config(agg=agg, rounds=2))
    names = [one.name for one in pictures._together(run)]
    assert names == [] and list(pictures._trajectories(run, run.opinions)) == []
    assert "Isolated clients" not in text and "Coalitions a round" not in text
    assert ("No coalitions" if agg == "fedavg" else "every client trains alone") in text
    assert pictures.space_of(run) == "update"


def test_one_round_and_no_unit(tmp_path):
    fleet = fleet_of()._replace(unit="")
    run, text = quick(tmp_path / "run", fleet=fleet, rounds=1)
    assert "MAE units" in text and "after 1 round," in text
    assert [one.name for one in pictures._over_rounds(run)] == ALL[:2]


def test_one_client(tmp_path):
    run, text = quick(tmp_path / "run", fleet=fleet_of(1))
    assert "1 client judged" in text and "interval" not in text
    assert [one.name for one in pictures.pictures(run)] == ALL[:4]


def test_no_naive_forecast(tmp_path):
    fleet = fleet_of()
    nothing = {name: np.full_like(units, np.nan) for name, units in fleet.naive.items()}
    run, text = quick(tmp_path / "run", fleet=fleet._replace(naive=nothing))
    assert "naive forecast (" not in text and "the federated model" in text
    assert list(pictures._errors(run, run.clients)) == []
    assert [one.name for one in pictures._forecasts(run, run.clients, run.forecasts)] == [
        "forecasts"
    ]


def test_forecasts_that_are_not_finite(tmp_path):
    fleet = fleet_of()
    forecast = np.full(fleet.test.targets.shape, np.nan, np.float32)
    errors = forecast_errors.client_errors(forecast, fleet.test)
    errors = type(errors)(*map(np.asarray, errors))
    run, text = quick(tmp_path / "run", errors=errors, outputs_nw=forecast)
    assert "No client's errors are finite" in text and "not finite, left out" in text
    assert list(pictures._over_rounds(run)) == [] and list(pictures._errors(run, run.clients)) == []
    assert list(pictures._forecasts(run, run.clients, run.forecasts)) == []


def test_classes_of_samples(tmp_path):
    """A run without readings has no word and no picture of forecasts."""
    config = Config(samples="digits", opinion="update", tau=0.5, rounds=2)
    run, text = quick(tmp_path / "run", config=config, fleet=classes_of(), error=0.6)
    for wrong in ("forecast", "MAE", "reading", "liters", " nan"):
        assert wrong not in text.replace("--samples=readings", "").split("Settings")[0]
    assert "judged on their own test samples" in text and "Accuracy by round" in text
    assert "guess without a model" in text and "points of accuracy" in text
    assert "number of samples" in text and "share of the commonest class" in text
    drawn = [
        pictures._partition(run.partition),
        *pictures._over_rounds(run),
        *pictures._errors(run, run.clients),
    ]
    assert [one.name for one in drawn] == [
        "partition", "accuracy_per_round", "error_per_round", "errors_against_naive",
    ]  # fmt: skip
    assert run.forecasts is None and not (run.path / "forecasts.csv").exists()
    shares = run.clients[["majority_class_accuracy", "accuracy"]].to_numpy()
    points = np.concatenate([one.get_offsets() for one in drawn[3].figure.axes[0].collections])
    np.testing.assert_allclose(np.sort(points, axis=0), np.sort(100 * shares, axis=0))
    assert drawn[3].figure.axes[0].get_xlabel().startswith("accuracy %: the client's commonest")
    better = (shares[:, 1] > shares[:, 0]).sum()
    assert f"better for {better} of {CLIENTS} clients" in text
    assert "above the dashed line" in drawn[3].caption


def test_predictions_name_samples_and_classes(tmp_path):
    fleet = classes_of()
    path = make_run(tmp_path / "run", Config(samples="digits", rounds=1), fleet=fleet, rounds=1)
    text = ["client", "actual", "predicted", "majority_class"]
    table = RunFolder(path, None).read_table("predictions", text)
    assert len(table) == fleet.test.mask.sum() == len(set(table["sample"]))
    owners = [fleet.client_ids[c] for c in fleet.owners[1][table["sample"]]]
    assert table["client"].tolist() == owners
    clients = RunFolder(path, None).read_table("clients", ["client"]).set_index("client")
    for guess, column in (
        ("predicted", "accuracy"),
        ("majority_class", "majority_class_accuracy"),
    ):
        right = (table["actual"] == table[guess]).groupby(table["client"]).mean()
        np.testing.assert_allclose(right, clients[column][right.index], rtol=1e-6)
    assert table["probability"].between(0.25, 1).all()


def test_nobody_isolated(tmp_path):
    run, text = quick(tmp_path / "run", labels_s=np.zeros(CLIENTS, np.int32))
    assert "at least half of the rounds they took part in: none." in text
    (scatter,) = pictures._errors(run, run.clients)
    legend = [entry.get_text() for entry in scatter.figure.axes[0].get_legend().get_texts()]
    assert legend == ["clients", "equal"]


def test_planted_groups_and_clients_left_out_of_rounds(tmp_path):
    fleet = fleet_of()
    _, text = quick(
        tmp_path / "run", fleet=fleet._replace(planted=np.arange(CLIENTS) % 2), masked=[0]
    )
    assert "Agreement with the planted groups" in text
    assert "Drawn for a round, but not part of it" in text
    assert "not finite" in text and fleet.client_ids[0] in text


def test_clients_without_weight_are_named(tmp_path):
    weights_s = np.full(CLIENTS, 1 / (CLIENTS - 1))
    weights_s[2] = 0
    config = Config(agg="multi_krum", attack="scale", rounds=2)
    attacker_s = np.arange(CLIENTS) == 2
    _, text = quick(tmp_path / "run", config=config, weights_s=weights_s, attacker_s=attacker_s)
    assert "Took part, but did not count in the average:" in text
    assert re.search(r"attacker\s+h0002\s+2 of 2\s+yes\s", text)
    assert "In all, 6.4e-05 MB went to the clients" in text  # 4 bytes, 8 clients, 2 rounds


def test_references_say_what_they_are(tmp_path):
    """The true groups are shown; a pooled model has no cohort and no federated name."""
    fleet = fleet_of()._replace(planted=np.arange(CLIENTS) % 2)
    _, text = quick(tmp_path / "oracle", fleet=fleet, config=Config(agg="oracle", rounds=2))
    assert "true groups" in text and "members" in text and "the coalition's model" in text
    _, text = quick(tmp_path / "pooled", config=Config(agg="centralized", rounds=2))
    assert "drawn for" not in text and "the central model" in text


def test_a_run_that_was_stopped(tmp_path):
    config = Config(opinion="update", tau=0.5, rounds=9)
    path = make_run(tmp_path / "run", config, finish=False)
    with open(path / "coalitions.csv", "a") as file:
        file.write('3,"torn')
    build.write_report(path)
    text = Page(path / "report.html").text
    assert "stopped after 2 of 9 rounds" in text and f"--resume={path}" in text
    assert "Coalitions a round" in text and "Isolated clients" not in text
    names = {file.stem for file in (path / "pictures").iterdir()}
    assert names == {"error_per_round", "accuracy_per_round", "together"}


def test_tables_of_an_earlier_end_are_not_shown(tmp_path):
    path = make_run(tmp_path / "run")
    rows = (path / "rounds.csv").read_text().splitlines()
    (path / "rounds.csv").write_text("\n".join([*rows, "3," + rows[-1].split(",", 1)[1]]) + "\n")
    run = load.load_run(path)
    assert run.clients is None and run.opinions is None
    assert len(run.rounds) == 3


def test_folders_that_are_none(tmp_path, capsys):
    assert door.main(["report", f"--run={tmp_path}"]) == 2
    assert "it has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert door.main(["report", f"--run={tmp_path}"]) == 2
    assert "no round of it is finished" in capsys.readouterr().err
    for argv in (["report"], ["report", "folder"], ["report", "--runs=x"]):
        assert door.main(argv) == 2
        assert capsys.readouterr().err.startswith("Error:")
    path = make_run(tmp_path / "run")
    (path / "opinions.npz").write_bytes(b"torn")
    assert door.main(["report", f"--run={path}"]) == 2
    assert "opinions.npz cannot be read" in capsys.readouterr().err


def test_settings_of_another_version_are_shown(tmp_path):
    path = make_run(tmp_path / "run")
    stored = json.loads((path / "config.json").read_text())
    del stored["flags"]["epochs"]
    stored["flags"]["from_the_future"] = 7
    (path / "config.json").write_text(json.dumps(stored))
    run = load.load_run(path)
    assert run.config == dataclasses.replace(run.config, epochs=Config.epochs)
    assert "--from_the_future" in build.page_of(run, [])


@pytest.mark.slow
def test_a_thousand_clients_stay_legible_and_small(tmp_path):
    num = 1000
    rng = np.random.default_rng(0)
    figure = plots.errors_against_naive(
        rng.lognormal(size=num), rng.lognormal(size=num), rng.random(num) < 0.1, "naive", "L"
    )
    moved = numbers.Trajectory(rng.random((4, num, 2)), np.array([0.5, 0.2]), np.arange(num) // 2)
    names = [f"client {i}" for i in range(num)]
    apart = rng.random((num, num))
    figures = [
        figure,
        plots.trajectories(moved),
        plots.together(numbers.Together(apart, names)),
        plots.dissimilarity(
            numbers.Dissimilarity(apart, apart[np.triu_indices(num, 1)], names, [2] * (num // 2)),
            0.5, "1 - cosine", True,
        ),
    ]  # fmt: skip
    assert sum(len(plots.to_svg(one, f"n{i}")) for i, one in enumerate(figures)) < 2.5e6
    for one in figures[2:]:
        assert not [tick for tick in one.axes[0].get_yticklabels() if tick.get_text()]
    legend = figures[1].axes[1].get_legend()
    assert len(legend.get_texts()) <= len(plots.PALETTE) + 2


def test_lines_show_the_tables(tmp_path):
    run = load.load_run(make_run(tmp_path / "run", rounds=3))
    error, accuracy = pictures._over_rounds(run)
    lines = error.figure.axes[0].get_lines()
    np.testing.assert_array_equal(lines[0].get_ydata(), run.rounds["mae_units"])
    np.testing.assert_array_equal(lines[1].get_ydata(), run.rounds["mae_units_median"])
    levels = sorted(float(line.get_ydata()[0]) for line in lines[2:])
    columns = [c for c in run.clients if re.fullmatch("(yest|last|mean_7|train_m).*_mae_units", c)]
    np.testing.assert_allclose(levels, sorted(run.clients[columns].mean()))
    line = accuracy.figure.axes[0].get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), 100 * run.rounds["accuracy"])


def test_forecasts_are_in_units_and_complete(tmp_path):
    fleet = fleet_of()
    path = make_run(tmp_path / "run", error=0.0)
    table = RunFolder(path, None).read_table("forecasts", ["client", "time"])
    assert len(table) == fleet.test.mask.sum()
    for row in table.sample(20, random_state=0).itertuples():
        i = fleet.client_ids.index(row.client)
        w = list(fleet.test_times[i].astype("datetime64[s]").astype(str)).index(row.time)
        scale, shift = fleet.test.scale[i, w], fleet.test.shift[i, w]
        reading = fleet.test.targets[i, w] * scale + shift
        assert row.actual == pytest.approx(reading, rel=1e-5, abs=1e-3)
        assert row.forecast == pytest.approx(row.actual, rel=1e-5, abs=1e-3)
        assert row.yesterday == pytest.approx(fleet.naive["yesterday"][i, w], nan_ok=True)


@pytest.mark.parametrize(
    ("low", "expected"),
    [
        (1e-3, {2.0, 1.0, 0.1, 0.01, 1e-3}),
        (0.1, {2.0, 1.0, 0.5, 0.2, 0.1}),
        (1e-7, {2.0, 0.1, 0.01, 1e-3}),
    ],
)
def test_ticks_of_tau_leave_each_other_room(low, expected):
    found = plots._tau_ticks(low)
    assert expected <= {round(one, 9) for one in found} or low == 1e-7
    places = sorted(np.log10(2 / np.array(found)) / np.log10(2 / low))
    assert np.diff(places).min() > 0.06
    assert [plots._tau_text(one) for one in (2.0, 1.0, 0.5, 0.1, 0.01, 0.002)] == [
        "\N{MINUS SIGN}1", "0", "0.5", "0.9", "0.99", "0.998",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.3, 280.0, [10, 100]),
        (2e-5, 4.2e-4, [2e-5, 5e-5, 1e-4, 2e-4]),
        (0.3, 0.9, [0.5]),
        (1e-9, 1e3, [1e-9, 1e-6, 1e-3, 1e0, 1e3]),
    ],
)
def test_ticks_of_a_log_axis_are_few(low, high, expected):
    found = plots._log_ticks(low, high)
    assert len(found) <= 6 and all(low <= tick <= high for tick in found)
    assert {f"{tick:g}" for tick in expected} <= {f"{tick:g}" for tick in found}


def test_large_errors_do_not_hide_the_others():
    naive_n = np.array([0.0, 40, 50, 60, 70, 80, 90, 100])
    model_n = np.array([3.0, 41, 48, 66, 70, 85, 99, 2000])
    nobody = np.zeros(8, bool)

    def drawn(model_n, **options):
        return plots.errors_against_naive(naive_n, model_n, nobody, "naive", "L", **options).axes[0]

    far = drawn(model_n)
    assert far.get_xscale() == far.get_yscale() == "symlog" and far.get_xlim() == far.get_ylim()
    places = far.transLimits.transform(far.transScale.transform(np.c_[naive_n, model_n]))
    assert places.min() >= 0 and places.max() <= 1
    assert np.ptp(places[1:-1, 0]) > 0.1  # an even scale would leave them 0.03
    assert drawn(model_n.clip(max=200)).get_xscale() == "linear"
    assert drawn(model_n / 2000, most=1.0).get_xscale() == "linear"  # shares


def test_names_in_pictures_are_short_and_no_formulas():
    assert plots.plain("$x^2$ and $") == r"\$x^2\$ and \$"
    assert plots.plain("a\tb\x00c") == "a·b·c"
    assert len(plots.plain("x" * 100)) == 24
    assert len(set(plots.PALETTE)) == len(plots.PALETTE)


def test_pieces_of_a_page():
    assert page.table([], ["a"], "nothing") == ""
    table = page.table([["<x>", "1.5"], ["y", "-"]], ["name", "value"], 'a "label"')
    assert "&lt;x&gt;" in table and '<td class="number">1.5' in table
    assert 'aria-label="a &quot;label&quot;"' in table
    assert page.bullets(["--tau=0.9 & more"]) == (
        "<ul>\n<li><code>--tau=0.9</code> &amp; more</li>\n</ul>"
    )
    assert page.bullets([]) == ""


def test_older_run_folders_still_have_a_report(tmp_path):
    """Folders from before `opinions.npz` and the clients' use."""
    path = make_run(tmp_path / "run")
    (path / "opinions.npz").unlink()
    (path / "forecasts.csv").unlink()
    run = load.load_run(path)
    assert run.opinions is None and run.forecasts is None
    run = run._replace(clients=run.clients.drop(columns=["mean_units", "zero_share"]))
    text = re.sub("<[^>]*>", " ", build.page_of(run, []))
    assert "stopped after" not in text and "Isolated clients" in text


def test_copied_folder_gives_the_same_page_but_for_its_path(whole, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    run, other = load.load_run(whole), load.load_run(copy)
    pd.testing.assert_frame_equal(run.rounds, other.rounds)
    assert build.page_of(run, []).replace(str(whole), str(copy)) == build.page_of(other, [])


def test_folder_without_rounds_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match=re.escape("config.json")):
        load.load_run(tmp_path)
