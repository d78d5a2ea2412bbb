"""Settings: what is refused, with flag, value and fix, before anything starts."""

import dataclasses
import math

import pytest

from fedjax_hk.rules import CHOICES, RULES
from fedjax_hk.settings import config as config_lib
from fedjax_hk.settings.checks import check, check_fleet
from fedjax_hk.settings.config import (
    SETTINGS,
    Config,
    ConfigError,
    choices_of,
    is_read,
    of_kind,
    value_of,
)
from fedjax_hk.settings.setting import KINDS


def problems_of(**settings) -> list[str]:
    """Lines of the refusal; none if the settings are taken."""
    try:
        check(Config(**settings))
    except ConfigError as error:
        return str(error).splitlines()
    return []


GROUPS = ("Task", "Rule", "Choices", "Training", "Disturbances", "Data", "Classes", "Run")
NUMBERS = [item.name for item in dataclasses.fields(Config) if "float" in item.type]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(name, value):
    lines = problems_of(**{name: value})
    assert f"--{name}={value}: give a finite number." in lines


@pytest.mark.parametrize(
    ("settings", "flag", "fix"),
    [
        # Nothing to do, or less.
        ({"rounds": 0}, "--rounds=0", "1 or more"),
        ({"rounds": -3}, "--rounds=-3", "1 or more"),
        ({"clients_per_round": 0}, "--clients_per_round=0", "1 or more"),
        ({"epochs": 0}, "--epochs=0", "1 or more"),
        ({"batch_size": 0}, "--batch_size=0", "1 or more"),
        ({"lookback": 0}, "--lookback=0", "1 or more"),
        ({"horizon": 0}, "--horizon=0", "1 or more"),
        ({"fleet_clients": 0}, "--fleet_clients=0", "1 or more"),
        ({"fleet_days": 59}, "--fleet_days=59", "60 or more"),
        ({"min_coalition": 0}, "--min_coalition=0", "1 or more"),
        ({"agg": "fixed_k_cosine", "num_coalitions": 0}, "--num_coalitions=0", "1 or more"),
        ({"chunk": -1}, "--chunk=-1", "0 or more"),
        ({"devices": -1}, "--devices=-1", "0 or more"),
        ({"seed": -1}, "--seed=-1", "0 or more"),
        ({"seed": 2**31}, "--seed=2147483648", "below 2147483648"),
        ({"learning_rate": 0.0}, "--learning_rate=0.0", "above 0"),
        ({"learning_rate": -1e-3}, "--learning_rate=-0.001", "above 0"),
        ({"server_opt": "sgd", "server_lr": 0.0}, "--server_lr=0.0", "above 0"),
        ({"dropout": 1.0}, "--dropout=1.0", "below 1"),
        ({"dropout": -0.1}, "--dropout=-0.1", "from 0"),
        ({"loss": "quantile", "quantile": 1.0}, "--quantile=1.0", "between 0 and 1"),
        ({"agg": "fedprox", "mu": -1.0}, "--mu=-1.0", "0 or more"),
        ({"agg": "perfedavg_fo", "alpha": -1.0}, "--alpha=-1.0", "0 or more"),
        ({"agg": "fedcw", "min_clients": 0}, "--min_clients=0", "1 or more"),
        ({"agg": "fedcw", "select_decay": -0.1}, "--select_decay=-0.1", "0 or more"),
        ({"agg": "multi_krum", "trim": 0.5}, "--trim=0.5", "below 0.5"),
        ({"agg": "wscc", "damping": 0.4}, "--damping=0.4", "0.5 to below 1"),
        ({"drop_rate": 1.1}, "--drop_rate=1.1", "from 0 to 1"),
        ({"straggler_rate": -0.1}, "--straggler_rate=-0.1", "from 0 to 1"),
        ({"attack": "scale", "attack_share": 2.0}, "--attack_share=2.0", "from 0 to 1"),
        ({"finetune_epochs": -1}, "--finetune_epochs=-1", "0 or more"),
        # Names that are not there.
        ({"agg": "hk_cosin"}, "--agg=hk_cosin", "hk_cosine"),
        ({"scaler": "max"}, "--scaler=max", "minmax"),
        ({"opinion": "delta"}, "--opinion=delta", "update"),
        ({"loss": "MSE"}, "--loss=MSE", "mse"),
        ({"opinion_leaves": "(lstm"}, "--opinion_leaves=(lstm", "regular expression"),
        ({"personal_layers": "(lstm"}, "--personal_layers=(lstm", "regular expression"),
        ({"attack": "flip"}, "--attack=flip", "sign_flip"),
        # Thresholds out of the range that they have here.
        ({"tau": 1.01}, "--tau=1.01", "from -1 to 1"),
        ({"tau": -1.01}, "--tau=-1.01", "from -1 to 1"),
        ({"tau": -0.1, "tau_mode": "quantile"}, "--tau=-0.1", "from 0 to 1"),
        ({"tau": 1.1, "tau_mode": "quantile"}, "--tau=1.1", "from 0 to 1"),
        ({"agg": "hk_euclidean", "tau": 2.1}, "--tau=2.1", "from 0 to 2"),
        ({"agg": "hk_euclidean", "tau": -0.1}, "--tau=-0.1", "from 0 to 2"),
        ({"agg": "hk_euclidean", "tau": 1.5, "euclid_tau": "matched"}, "--tau=1.5", "to 1"),
        ({"agg": "hk_euclidean", "tau": 1.5, "euclid_tau": "linear"}, "--tau=1.5", "to 1"),
        ({"agg": "hk_euclidean", "epsilon": -1.0}, "--epsilon=-1.0", "0 or more"),
        ({"agg": "hk_band", "eps_lower": -1.5}, "--eps_lower=-1.5", "from -1 to 1"),
        ({"agg": "hk_band", "eps_upper": 1.5}, "--eps_upper=1.5", "from -1 to 1"),
        ({"agg": "hk_band", "eps_lower": 0.9, "eps_upper": 0.8}, "--eps_lower=0.9", "swap"),
        ({"agg": "hk_band", "eps_upper": 0.4}, "--eps_upper=0.4", "swap"),
        # What does not go together.
        ({"agg": "fedavg", "tau": 0.9}, "--tau=0.9", "--agg=hk_cosine"),
        ({"agg": "hk_band", "tau": 0.9}, "--tau=0.9", "--agg=hk_cosine"),
        ({"agg": "hk_cosine", "epsilon": 1.0}, "--epsilon=1.0", "--agg=hk_euclidean"),
        ({"agg": "hk_cosine", "eps_lower": 0.5}, "--eps_lower=0.5", "--agg=hk_band"),
        ({"agg": "hk_cosine", "num_coalitions": 3}, "--num_coalitions=3", "fixed_k"),
        ({"mu": 0.1}, "--mu=0.1", "--agg=fedprox"),
        ({"alpha": 0.1}, "--alpha=0.1", "--agg=perfedavg_fo"),
        ({"quantile": 0.9}, "--quantile=0.9", "--loss=quantile"),
        ({"server_lr": 0.1}, "--server_lr=0.1", "--server_opt="),
        ({"agg": "fedavg", "opinion": "update"}, "--opinion=update", "--agg=hk_cosine"),
        ({"agg": "fedavg", "tau_mode": "quantile"}, "--tau_mode=quantile", "leave it out"),
        ({"agg": "hk_cosine", "euclid_tau": "linear"}, "--euclid_tau=linear", "leave it out"),
        ({"agg": "fedavg", "state_norm": "init"}, "--state_norm=init", "leave it out"),
        ({"agg": "fedavg", "opinion_leaves": "lstm"}, "--opinion_leaves=lstm", "leave it out"),
        ({"agg": "hk_euclidean", "epsilon": 1.0, "tau": 0.5}, "--tau=0.5", "keep one"),
        ({"agg": "fedavg", "serve": "coalition"}, "--serve=coalition", "--agg=hk_cosine"),
        ({"serve": "coalition", "server_opt": "adam"}, "--server_opt=adam", "--serve=global"),
        ({"agg": "fedavg", "beta": 0.1}, "--beta=0.1", "--agg=fedcw"),
        ({"agg": "fedcw_weight", "min_clients": 3}, "--min_clients=3", "--select=distance_decay"),
        ({"agg": "fedcw_select", "distance_scale": "raw"}, "--distance_scale=raw", "leave it out"),
        ({"agg": "median", "trim": 0.1}, "--trim=0.1", "trimmed_mean"),
        ({"agg": "hk_cosine", "preference": -1.0}, "--preference=-1.0", "--agg=wscc"),
        ({"agg": "wscc", "linkage": "ward"}, "--linkage=ward", "leave it out"),
        ({"agg": "fedclust", "tau": 1.5}, "--tau=1.5", "from 0 to 1"),
        ({"agg": "fedclust", "epsilon": 1.0, "tau": 0.5}, "--tau=0.5", "keep one"),
        ({"attack_scale": 2.0}, "--attack_scale=2.0", "--attack=sign_flip"),
        ({"serve": "coalition", "average": "median"}, "--average=median", "--serve=global"),
        ({"agg": "wscc", "local": "scaffold"}, "--local=scaffold", "--serve=global"),
        ({"agg": "fedma", "client_opt_reset": False}, "--client_opt_reset=False", "leave one"),
        ({"agg": "fedma", "local": "scaffold"}, "--local=scaffold", "leave one"),
        ({"agg": "fedma", "personal_layers": "lstm"}, "--personal_layers=lstm", "leave one"),
        ({"agg": "centralized", "drop_rate": 0.1}, "--drop_rate=0.1", "leave it out"),
        ({"agg": "centralized", "attack": "scale"}, "--attack=scale", "leave it out"),
        ({"agg": "centralized", "clients_per_round": 3}, "--clients_per_round=3", "leave it out"),
        ({"agg": "oracle", "data": "a.csv"}, "--data=a.csv", "embedded fleet"),
        ({"agg": "oracle", "samples": "digits"}, "--samples=digits", "embedded fleet"),
        ({"agg": "oracle", "opinion": "update"}, "--opinion=update", "--agg=hk_cosine"),
        ({"clients": "h1,h2"}, "--clients=h1,h2", "--data"),
        ({"data": "a.csv", "fleet_clients": 9}, "--fleet_clients=9", "leave one"),
        ({"data": "a.csv", "fleet_days": 90}, "--fleet_days=90", "leave one"),
        # What the task, or its way of dealing samples out, does not read.
        ({"samples": "digits", "lookback": 6}, "--lookback=6", "--samples=readings"),
        (
            {"samples": "npz", "scaler": "robust"},
            "--scaler=robust",
            "--samples=npz does not read it",
        ),
        ({"samples": "leaf", "unit": "L"}, "--unit=L", "--samples=readings"),
        ({"samples": "digits", "dropout": 0.1}, "--dropout=0.1", "--samples=readings"),
        (
            {"samples": "digits", "activation": "linear"},
            "--activation=linear",
            "--samples=readings",
        ),
        ({"samples": "digits", "loss": "mae"}, "--loss=mae", "cross_entropy"),
        ({"loss": "cross_entropy"}, "--loss=cross_entropy", "mse, mae, huber"),
        ({"samples": "digits", "data": "a.npz"}, "--data=a.npz", "npz or leaf"),
        ({"model": "mlp"}, "--model=mlp", "--samples=digits"),
        ({"partition": "iid"}, "--partition=iid", "--samples=digits"),
        ({"alpha_dirichlet": 0.1}, "--alpha_dirichlet=0.1", "--samples=digits"),
        ({"num_clients": 9}, "--num_clients=9", "--samples=digits"),
        (
            {"samples": "leaf", "num_clients": 9},
            "--num_clients=9",
            "--samples=digits, mnist5k or npz",
        ),
        (
            {"samples": "leaf", "alpha_dirichlet": 1.0},
            "--alpha_dirichlet=1.0",
            "--samples=leaf does",
        ),
        (
            {"samples": "digits", "partition": "iid", "alpha_dirichlet": 1.0},
            "--alpha_dirichlet=1.0",
            "--partition=iid does not read it",
        ),
        (
            {"samples": "digits", "shards_per_client": 2},
            "--shards_per_client=2",
            "--partition=shards",
        ),
        ({"samples": "digits", "image_shape": "8,8"}, "--image_shape=8,8", "--samples=npz or leaf"),
        ({"samples": "leaf", "max_samples": 9}, "--max_samples=9", "--samples=npz"),
        ({"samples": "digits", "alpha_dirichlet": 0.0}, "--alpha_dirichlet=0.0", "above 0"),
        ({"samples": "digits", "min_samples": 0}, "--min_samples=0", "1 or more"),
        ({"samples": "npz", "image_shape": "28x28"}, "--image_shape=28x28", "28,28"),
        ({"samples": "npz", "image_shape": "28,0"}, "--image_shape=28,0", "28,28"),
        ({"samples": "digit"}, "--samples=digit", "digits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_settings_are_refused_with_flag_value_and_fix(settings, flag, fix):
    lines = problems_of(**settings)
    assert any(flag in line and fix in line for line in lines), lines


def test_all_problems_are_said_at_once():
    lines = problems_of(rounds=0, tau=math.nan, scaler="none", dropout=2.0, seed=-1)
    flags = ["--rounds=0", "--tau=nan", "--scaler=none", "--dropout=2.0", "--seed=-1"]
    assert len(lines) == 5
    assert all(any(line.startswith(flag) for line in lines) for flag in flags)


def test_all_contradictions_are_said_at_once():
    lines = problems_of(agg="fedavg", tau=0.9, mu=0.1, serve="coalition")
    assert [line.split(":")[0] for line in lines] == ["--tau=0.9", "--mu=0.1", "--serve=coalition"]


@pytest.mark.parametrize("agg", RULES)
def test_every_rule_runs_with_its_defaults(agg):
    assert problems_of(agg=agg) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"tau": 1.0},
        {"tau": -1.0},
        {"tau": 0.0, "tau_mode": "quantile"},
        {"agg": "hk_euclidean", "tau": 2.0},
        {"agg": "hk_euclidean", "tau": -1.0, "euclid_tau": "matched"},
        {"agg": "hk_euclidean", "epsilon": 0.0},
        {"agg": "hk_euclidean", "epsilon": 100.0, "state_norm": "init"},
        {"agg": "hk_band", "eps_lower": 0.7, "eps_upper": 0.7},
        {"agg": "hk_band", "eps_lower": 0.0, "eps_upper": 1.0, "tau_mode": "quantile"},
        {"agg": "hk_cosine", "local": "prox", "mu": 0.1},
        {"agg": "fedavg", "local": "perfedavg_hf", "alpha": 0.1},
        {"agg": "fedavg", "server_opt": "yogi", "server_lr": 0.1},
        {"agg": "fixed_k_cosine", "opinion": "update", "serve": "coalition"},
        {"samples": "digits", "alpha_dirichlet": 0.1, "num_clients": 5, "model": "mlp"},
        {"samples": "mnist5k", "partition": "quantity", "alpha_dirichlet": 10.0},
        {"samples": "digits", "partition": "shards", "shards_per_client": 3, "min_samples": 1},
        {"samples": "npz", "data": "a.npz", "image_shape": "32,32,3", "max_samples": 1000},
        {"samples": "leaf", "data": "folder", "image_shape": "28,28", "model": "cnn_large"},
        {"samples": "digits", "loss": "cross_entropy"},
        {"loss": "quantile", "quantile": 0.9},
        {"data": "a.csv", "clients": "h1"},
        {"mu": 0.0, "agg": "fedprox"},
        {"opinion_leaves": "lstm_.*/kernel$"},
        {"agg": "hk_cosine", "select": "distance_decay", "within": "distance", "beta": -0.5},
        {"agg": "hk_cosine", "align": "neurons", "average": "trimmed_mean", "trim": 0.0},
        {"agg": "hk_cosine", "within": "krum", "trim": 0.4, "serve": "coalition"},
        {"agg": "fedclust", "epsilon": 0.0, "linkage": "ward"},
        {"agg": "wscc", "preference": -2.0, "damping": 0.9, "serve": "global"},
        {"agg": "fedcw", "select_decay": 0.0, "server_opt": "yogi", "local": "prox"},
        {"agg": "scaffold", "local": "scaffold_start", "average": "median"},
        {"drop_rate": 1.0, "straggler_rate": 1.0, "attack": "noise", "attack_share": 0.0},
        {"agg": "local", "personal_layers": "output", "finetune_epochs": 2},
        {"agg": "fedclust", "tau": 0.3},
    ],
)
def test_settings_at_their_borders_are_taken(settings):
    assert problems_of(**settings) == []


def test_choices_replace_those_of_the_rule():
    config = Config(agg="hk_cosine", opinion="update", serve="coalition", within="samples")
    assert config.rule() == RULES["hk_cosine"]._replace(
        opinion="update", serve="coalition", within="samples"
    )
    assert Config(agg="local").rule() == RULES["local"]
    assert set(CHOICES) <= {item.name for item in dataclasses.fields(Config)}


def test_numbers_have_the_defaults_that_the_help_says():
    told = {name: known for name, known in SETTINGS.items() if known.unset is not None}
    assert len(told) == 20
    for name, known in told.items():
        assert value_of(Config(), name) == known.unset
        # epsilon is off unless given; the others depend on what else is chosen.
        assert name in ("epsilon", "server_lr", "min_clients") or f"({known.unset}" in known.help
    assert value_of(Config(tau=0.5), "tau") == 0.5
    assert value_of(Config(epsilon=0.0), "epsilon") == 0.0
    assert value_of(Config(server_opt="sgd"), "server_lr") == 1.0
    assert value_of(Config(server_opt="adam"), "server_lr") == 0.01
    assert value_of(Config(agg="fedclust"), "tau") == 0.5
    assert value_of(Config(agg="fedcw"), "min_clients") == 0  # the selector knows the fleet
    assert value_of(Config(), "loss") == "mse"
    assert value_of(Config(samples="npz"), "loss") == "cross_entropy"
    assert value_of(Config(), "preference") is None
    of = config_lib.opinion_leaves
    assert of(Config(agg="fedclust"), "output") == "^output/"
    assert of(Config(agg="fedclust"), "") == of(Config(), "output") == ""
    assert of(Config(agg="fedclust", opinion_leaves="."), "output") == "."


def test_clients_per_round_are_judged_by_the_fleet():
    assert check_fleet(Config(), 184) == 50
    assert check_fleet(Config(), 7) == 7
    assert check_fleet(Config(clients_per_round=7), 7) == 7
    with pytest.raises(ConfigError, match=r"--clients_per_round=8: the fleet has 7 .* at most 7"):
        check_fleet(Config(clients_per_round=8), 7)


@pytest.mark.parametrize("name", ["num_coalitions", "min_coalition"])
def test_coalitions_are_judged_by_the_clients_of_a_round(name):
    config = Config(agg="fixed_k_cosine", clients_per_round=4, **{name: 4})
    assert check_fleet(config, 9) == 4
    with pytest.raises(ConfigError, match=rf"--{name}=5: a round has 4 clients; give at most 4"):
        check_fleet(dataclasses.replace(config, **{name: 5}), 9)


def test_every_setting_has_help_a_group_and_a_kind():
    assert list(SETTINGS) == [item.name for item in dataclasses.fields(Config)]
    for name, known in SETTINGS.items():
        assert known.name == name and known.help
        assert known.group in GROUPS
        assert known.kind in KINDS
        assert known.type in ("str", "int", "float", "bool")
        assert not (known.shapes_program or not known.resumable) or known.kind == "run"
        assert known.default is None or not known.choices or known.default in known.choices
    assert all(of_kind(kind) for kind in KINDS)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"agg": "fedavg", "mu": 0.1}, "--agg=fedavg does not read it; leave it out, or use "
         "--local=prox or --agg=fedprox."),
        ({"agg": "fedavg", "tau": 0.5}, "--agg=fedavg does not read it; leave it out, or use "
         "--agg=hk_cosine, hk_euclidean or fedclust."),
        ({"agg": "fedavg", "opinion": "update"}, "--agg=fedavg does not read it; leave it out, or "
         "use a rule that does, such as --agg=hk_cosine."),
        ({"trim": 0.1}, "--agg=hk_cosine does not read it; leave it out, or use --within=krum, or "
         "--average=trimmed_mean, or --agg=trimmed_mean or multi_krum."),
        ({"quantile": 0.9}, "--loss=mse does not read it; leave it out, or use --loss=quantile."),
        ({"attack_share": 0.1}, "--attack=none does not read it; leave it out, or use "
         "--attack=sign_flip, scale or noise."),
        ({"alpha_dirichlet": 0.1}, "--samples=readings does not read it; leave it out, or use "
         "--samples=digits, mnist5k or npz."),
        ({"samples": "digits", "partition": "iid", "alpha_dirichlet": 0.1}, "--partition=iid does "
         "not read it; leave it out, or use --partition=dirichlet or quantity."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_nobody_reads_is_said_with_who_would(settings, line):
    name = list(settings)[-1]
    assert problems_of(**settings) == [f"--{name}={settings[name]}: {line}"]


def test_every_setting_that_some_choice_reads_is_refused_where_none_does():
    """With every default rule on readings, whatever is read elsewhere only."""
    made = choices_of(Config(agg="fedavg"))
    unread = [name for name in SETTINGS if not is_read(name, made)]
    assert len(unread) > 20
    other = {"float": 0.4, "int": 3, "str": "1,1", "bool": True}
    for name in unread:
        known = SETTINGS[name]
        names = [one for one in known.choices if one != known.default]
        value = 0.6 if name == "damping" else names[0] if names else other[known.type]
        lines = problems_of(agg="fedavg", **{name: value})
        assert any(one.startswith(f"--{name}={value}: ") and "read it" in one for one in lines)
