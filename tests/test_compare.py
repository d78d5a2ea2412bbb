"""Several runs side by side."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest
from made_run import HOSTILE, classes_of, fleet_of, make_run

from fedjax_hk import compare, metrics
from fedjax_hk.report import plots
from fedjax_hk.settings.config import Config
from fedjax_hk.store.run_folder import RunFolder

FEDAVG = Config(agg="fedavg", rounds=2)
UPDATES = Config(agg="hk_cosine", opinion="update", tau=0.5, rounds=2)


def seeded(config, seed):
    return dataclasses.replace(config, seed=seed, output=f"somewhere/{seed}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two rules with two seeds each; the coalitions forecast better."""
    base = tmp_path_factory.mktemp("runs")
    names = (HOSTILE, *fleet_of().client_ids[1:])
    fleet = fleet_of()._replace(client_ids=names)
    paths = []
    for name, config, error in (("hk", UPDATES, 0.05), ("avg", FEDAVG, 0.3)):
        for seed in (0, 1):
            path = base / f"{name}{seed}"
            paths.append(make_run(path, seeded(config, seed), fleet=fleet, error=error, seed=seed))
    return paths


def test_runs_that_differ_in_the_seed_are_one_method(runs):
    methods = compare.load_methods(runs)
    assert [one.name for one in methods] == [
        "hk_cosine --tau=0.5 --opinion=update",
        "fedavg",
    ]
    assert [len(one.runs) for one in methods] == [2, 2]
    tables = [pd.read_csv(path / "clients.csv") for path in runs]
    for i in range(len(tables[0])):
        expected = (tables[2]["mae_units"][i] + tables[3]["mae_units"][i]) / 2
        assert methods[1].headline_n[i] == pytest.approx(expected)
    table = compare.method_table(methods).set_index("method")
    means = [one["mae_units"].mean() for one in tables]
    assert table.loc["fedavg", "headline"] == pytest.approx(np.mean(means[2:]))
    assert table.loc["fedavg", "std_seeds"] == pytest.approx(abs(means[2] - means[3]) / 2**0.5)
    assert table.loc["fedavg", "std_clients"] == pytest.approx(methods[1].headline_n.std())
    assert table.loc["fedavg", "seeds"] == 2
    assert sum(name.startswith("naive: ") for name in table.index) == 4


def test_seeds_that_were_carried_out_otherwise_are_one_method(tmp_path):
    paths = []
    changes = ({}, {"tensorboard": True, "data_cache": False}, {"chunk": 2, "report": False})
    for seed, change in enumerate(changes):
        config = dataclasses.replace(seeded(FEDAVG, seed), **change)
        paths.append(make_run(tmp_path / str(seed), config, seed=seed))
    (method,) = compare.load_methods(paths)
    assert method.name == "fedavg" and len(method.runs) == 3


def test_paired_differences(runs):
    methods = compare.load_methods(runs)
    assert compare.base_of(methods) == 1  # FedAvg, though it was given last
    ((name, found, better),) = compare.differences(methods, 1)
    apart = methods[0].headline_n - methods[1].headline_n
    assert name.startswith("hk_cosine") and found == metrics.bootstrap_interval(apart)
    assert found.mean == pytest.approx(apart.mean()) and found.high < 0 and better == len(apart)
    (line,) = compare.sentences(methods)
    assert "less than fedavg; 95 % interval" in line and "better for 8 of 8 clients" in line


def test_command_writes_table_and_page(runs, tmp_path, capsys):
    output = tmp_path / "out"
    assert compare.main(["compare", *map(str, runs), f"--output={output}"]) == 0
    said = capsys.readouterr().out
    assert f"Comparison: {output / 'compare.html'}" in said
    assert re.search(r"^fedavg +2 ", said, re.MULTILINE) and "Paired over clients" in said
    page = (output / "compare.html").read_text()
    assert page.count("<figure>") == 3 and "<script" not in page and "--seed" not in page
    assert sorted(file.name for file in (output / "pictures").iterdir()) == sorted(
        f"compare_{name}.{kind}"
        for name in ("differences", "methods", "rounds")
        for kind in ("png", "svg")
    )
    folder = RunFolder(output, None)
    clients = folder.read_table("compare_clients", ["client"])
    assert clients["client"][0] == HOSTILE and len(clients) == 8
    assert len(folder.read_table("compare")) == 6


def test_one_seed_has_no_spread_over_seeds(runs):
    methods = compare.load_methods([runs[0], runs[2]])
    table = compare.method_table(methods)
    assert table["std_seeds"].isna().all()
    figure = plots.methods(["a", "b"], [1, 2], [0.1, 0.2], [np.nan, np.nan], None, "L")
    labels = [entry.get_text() for entry in figure.axes[0].get_legend().get_texts()]
    assert labels == ["std over clients"]
    widths = sorted(patch.get_width() for patch in figure.axes[0].patches)
    assert widths == [1, 2]


def test_seeds_of_one_method_alone(runs):
    methods = compare.load_methods(runs[:2])
    assert len(methods) == 1 and compare.sentences(methods) == []


def test_refuses_what_cannot_be_compared(runs, tmp_path, capsys):
    fleet = fleet_of()
    one = make_run(tmp_path / "one", FEDAVG)

    def refused(*paths):
        assert compare.main(["compare", *map(str, paths), f"--output={tmp_path / 'no'}"]) == 2
        assert not (tmp_path / "no").exists()
        return capsys.readouterr().err

    assert "two run folders or more" in refused(one)
    assert "is given twice" in refused(one, one)
    other = make_run(tmp_path / "data", UPDATES, fleet=fleet._replace(fingerprint="abc"))
    assert "have other data" in refused(one, other)
    other = make_run(tmp_path / "unit", UPDATES, fleet=fleet._replace(unit="kWh"))
    assert "have other units (L and kWh)" in refused(one, other)
    assert "have other clients (8 and 8; " in refused(one, runs[0])
    other = make_run(tmp_path / "horizon", Config(agg="local", horizon=2, rounds=2))
    assert "have other horizons (1 and 2)" in refused(one, other)
    other = make_run(tmp_path / "judge", Config(agg="local", judge="validation", rounds=2))
    assert "have other parts to be judged on (--judge) (test and validation)" in refused(one, other)
    mask = fleet.test.mask.copy()
    mask[0, 0] = False
    fewer = fleet._replace(test=fleet.test._replace(mask=mask))
    other = make_run(tmp_path / "windows", UPDATES, fleet=fewer)
    assert "have other test windows" in refused(one, other)
    other = make_run(tmp_path / "stopped", UPDATES, finish=False)
    said = refused(one, other)
    assert "has not reached its end" in said and f"--resume={other}" in said
    assert "no config.json" in refused(one, tmp_path)
    (tmp_path / "file").write_text("")
    code = compare.main(["compare", *map(str, runs[:2]), f"--output={tmp_path / 'file'}"])
    assert code == 2 and "--output=" in capsys.readouterr().err


def test_classes_of_samples(tmp_path):
    """More is better, and samples that were dealt out otherwise cannot be compared."""
    flags = {"samples": "digits", "rounds": 2}
    good = make_run(tmp_path / "good", Config(**flags), fleet=classes_of(), error=0.2)
    bad = make_run(tmp_path / "bad", Config(agg="fedavg", **flags), fleet=classes_of(), error=3.0)
    methods = compare.load_methods([good, bad])
    (line,) = compare.sentences(methods)
    assert "points of accuracy more than fedavg" in line
    tables = [pd.read_csv(path / "clients.csv")["accuracy"] for path in (good, bad)]
    better = (tables[0] > tables[1]).sum()
    assert better > 4 and f"better for {better} of 8 clients" in line
    said = compare.write_comparison([good, bad], tmp_path / "out")
    assert "accuracy %" in said and "MAE" not in said and "forecast" not in said
    table = pd.read_csv(tmp_path / "out" / "compare.csv").set_index("method")
    assert table.loc["hk_cosine", "accuracy"] == pytest.approx(100 * tables[0].mean())
    assert {"accuracy_std_clients", "balanced_accuracy", "loss"} <= set(table.columns)
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "Right of the dashed line is better" in page
    dealt = classes_of()._replace(owners=(np.zeros(1, int), np.zeros(1, int)))
    dealt = make_run(tmp_path / "dealt", Config(agg="fedavg", **flags), fleet=dealt, finish=False)
    first, other = compare.load_run(good), compare.load_run(dealt)
    with pytest.raises(compare.CompareError, match="dealt out otherwise, as by another --seed"):
        compare._check_same(first, other)
    with pytest.raises(compare.CompareError, match="other tasks"):
        compare._check_same(first, compare.load_run(make_run(tmp_path / "meters", FEDAVG)))
