"""Every method and every modifier through the real command, to what a user finds afterwards.

Methods are those of `RULES`, choices those of `config.py`: what is registered is tested.
"""

import html
import re

import numpy as np
import pandas as pd
import pytest

from fedjax_hk import main as main_lib
from fedjax_hk.report.load import load_run
from fedjax_hk.rules import CHOICES, RULES
from fedjax_hk.settings import config as config_lib
from fedjax_hk.settings.choices import TABLES

pytestmark = pytest.mark.slow

ROUNDS, CLIENTS, COHORT = 5, 6, 4
SMALL = (f"--rounds={ROUNDS}", "--epochs=1", "--devices=1")
TASKS = {
    "embedded": (f"--fleet_clients={CLIENTS}", "--fleet_days=75"),
    "digits": ("--samples=digits", "--model=mlp", f"--num_clients={CLIENTS}"),
}


@pytest.fixture(autouse=True)
def quickly(monkeypatch, tmp_path):
    """Tiny runs are mostly compilation, which optimizing less makes shorter."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(tmp_path, capfd):
    """Runs the command in this process on a small task; returns the run folder."""

    def call(task, agg, *flags):
        cohort = () if RULES[agg].select == "pooled" else (f"--clients_per_round={COHORT}",)
        flags = (*SMALL, *cohort, *TASKS[task], *flags)
        code = main_lib.main(["main", f"--agg={agg}", *flags, f"--output={tmp_path / 'run'}"])
        out, err = capfd.readouterr()
        assert code == 0, err
        assert (tmp_path / "run/summary.txt").read_text() in out + "\n"
        for bad in ("Traceback", "arning", "could not be made"):
            assert bad not in out + err
        check(tmp_path / "run")
        return tmp_path / "run"

    return call


def check(path):
    """What the tables of any run must hold, and that nothing in the summary is no number."""
    run = load_run(path)
    rounds, clients, task, rule = run.rounds, run.clients, run.task, run.config.rule()
    assert rounds["round"].tolist() == list(range(1, ROUNDS + 1))
    assert len(clients) == CLIENTS
    errors = [c for curve in task.words.curves for c in curve.lines.values()]
    finite = rounds[[*errors, "train_loss", "dispersion", "largest_weight", "seconds"]]
    assert np.isfinite(finite.to_numpy()).all()
    judged = [
        task.headline.column,
        *(c for c in clients if c.startswith(f"{task.headline.column}_")),
    ]
    scored = clients[f"test_{task.words.samples_noun}"] > 0  # a client may be dealt no test sample
    assert scored.sum() > 1 and np.isfinite(clients.loc[scored, judged].to_numpy()).all()
    assert not rounds["diverged_clients"].any()

    took_part, asked = rounds["clients"], rounds["sampled_clients"]
    alone = rule.select == "pooled"
    most = 1 if alone else COHORT
    assert ((took_part >= 1) & (took_part <= asked) & (asked <= most)).all()
    assert (rounds["local_steps"] >= took_part).all()
    sizes = rounds["coalition_sizes"].map(lambda text: [int(size) for size in text.split()])
    assert (sizes.map(sum) == took_part).all()
    assert (sizes.map(len) == rounds["num_coalitions"]).all()
    assert ((rounds["largest_weight"] > 0) & (rounds["largest_weight"] <= 1 + 1e-6)).all()
    effective = rounds["effective_clients"]
    assert ((effective >= 1 - 1e-6) & (effective <= took_part + 1e-4)).all()

    down, up = rounds["bytes_down"], rounds["bytes_up"]
    if alone or rule.grouping == "singletons":  # nothing travels
        assert not down.any() and not up.any()
    else:
        one = down.iloc[0] // asked.iloc[0]
        assert one >= 4 and one % 4 == 0
        assert (down == one * asked).all() and (up >= one * took_part).all() and (up <= down).all()

    members = run.coalitions[run.coalitions["status"] == "took part"]
    assert members.groupby("round").size().tolist() == took_part.tolist()
    np.testing.assert_allclose(members.groupby("round")["weight"].sum(), 1, rtol=1e-5)
    assert members.groupby("round")["steps"].sum().tolist() == rounds["local_steps"].tolist()
    assert not missing_numbers((path / "summary.txt").read_text())


def missing_numbers(text):
    """Places where a reader finds "nan" or "inf"."""
    return re.findall(r".{0,40}\b(?:nan|inf|None|NaT)\b.{0,40}", text)


def check_report(path):
    """Pictures are there and drawn, and every number in words, tables and pictures is one."""
    page = (path / "report.html").read_text()
    text = html.unescape(re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL))
    assert not missing_numbers(text)
    labels = re.findall(r'aria-label="([^"]*)"', page)
    assert labels and not any(missing_numbers(label) for label in labels)
    files = sorted(one.name for one in (path / "pictures").iterdir())
    names = {name.split(".")[0] for name in files}
    assert files == sorted(f"{name}.{kind}" for name in names for kind in ("png", "svg"))
    assert all((path / "pictures" / name).stat().st_size > 3000 for name in files)
    run = load_run(path)
    expected = {*(curve.name for curve in run.task.words.curves), "errors_against_naive"}
    expected |= {"forecasts"} if run.config.samples == "readings" else {"partition"}
    if run.config.rule().select != "pooled":
        expected |= {"coalition_map", "dissimilarity"}
    if run.config.rule().grouping in ("hk_cosine", "hk_euclidean", "hk_band"):
        expected |= {"trajectories"}
    assert expected <= names <= expected | {"together"}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("agg", RULES)
def test_every_method(agg, task, command, tmp_path, capfd):
    if RULES[agg].grouping == "planted" and task == "digits":
        flags = (f"--agg={agg}", *TASKS[task], "--output=run")
        assert main_lib.main(["main", *flags]) == 2
        said = capfd.readouterr().err
        assert f"--agg={agg}" in said and "embedded fleet only" in said
        assert not list(tmp_path.iterdir())
        return
    check_report(command(task, agg))


MODIFIED = {  # the method to modify, flags, and the task ("" for both)
    "decaying cohort": ("hk_cosine", ("--select=distance_decay", "--select_decay=0.3"), ""),
    "matched units": ("fixed_k_cosine", ("--align=neurons",), ""),
    "personal layers": ("fedavg", ("--personal_layers=output",), ""),
    "personal layers, coalitions": ("hk_cosine", ("--personal_layers=output",), "digits"),
    "fine-tuning": ("fedavg", ("--finetune_epochs=1",), ""),
    "silent clients": ("hk_cosine", ("--drop_rate=0.3",), "embedded"),
    "stragglers": ("fednova", ("--straggler_rate=0.5",), "embedded"),
    "validation": ("fedavg", ("--judge=validation",), ""),
    "kept optimizers": ("fedavg", ("--noclient_opt_reset",), "embedded"),
    "gradient spread": ("fedavg", ("--gradient_spread",), "digits"),
    **{
        f"serve {agg}": (agg, ("--serve=coalition",), "digits")
        for agg, rule in RULES.items()
        if rule.serve == "global" and rule.grouping != "none"
    },
    **{
        f"{name} {value}": ("hk_cosine", (f"--{name}={value}",), "digits")
        for name in ("opinion", "within", "between", "average", "server_opt", "local")
        for value in CHOICES[name]
    },
    **{
        f"attack {name}": ("median", (f"--attack={name}", "--attack_scale=2"), "embedded")
        for name in TABLES["attack"]
        if name != "none"
    },
    **{
        f"partition {name}": ("hk_cosine", (f"--partition={name}", "--min_samples=3"), "digits")
        for name in TABLES["partition"]
    },
    **{
        f"scaler {name}": ("fedavg", (f"--scaler={name}", "--activation=linear"), "embedded")
        for name in config_lib.SETTINGS["scaler"].choices
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "task"), [(n, t) for n, row in MODIFIED.items() for t in TASKS if row[2] in ("", t)]
)
def test_every_modifier(name, task, command):
    agg, flags, _ = MODIFIED[name]
    rounds = pd.read_csv(command(task, agg, "--noreport", *flags) / "rounds.csv")
    if name == "decaying cohort":
        assert rounds["sampled_clients"].is_monotonic_decreasing
        assert rounds["sampled_clients"].iloc[-1] < COHORT
    if name == "fine-tuning":
        tuned = [column for column in rounds if column.endswith("_tuned")]
        assert tuned and np.isfinite(rounds[tuned].to_numpy()).all()
    if name == "silent clients":
        assert (rounds["clients"] < rounds["sampled_clients"]).any()
        assert (rounds["bytes_up"] < rounds["bytes_down"]).any()
    if name == "gradient spread":
        assert np.isfinite(rounds[["gradient_spread", "gradient_norm"]].to_numpy()).all()
