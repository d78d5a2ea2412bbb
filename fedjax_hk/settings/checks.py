"""Which settings cannot be run, and which do not go together; loads neither jax nor numpy."""

from __future__ import annotations

import dataclasses
import math
import re

from fedjax_hk.rules import NO_OPINIONS, Rule
from fedjax_hk.settings.config import LOSSES_OF, SPLITS, TASK_OF, Config, ConfigError, value_of


def check(config: Config) -> None:
    """Refuses settings that cannot be run, all problems at once.

    Errors: ConfigError; each line names the flag, the value and the fix.
    """
    problems = [*_check_values(config)]
    if not problems:  # what goes together is judged only for values that mean something
        problems += _check_together(config)
    if problems:
        raise ConfigError("\n".join(problems))


def check_fleet(config: Config, num_clients: int) -> int:
    """Clients a round, once the fleet is known.

    Errors: ConfigError if more are asked for than there are.
    """
    cohort = min(50, num_clients) if config.clients_per_round is None else config.clients_per_round
    if cohort > num_clients:
        raise ConfigError(
            f"--clients_per_round={cohort}: the fleet has {num_clients} "
            f"clients; give at most {num_clients}."
        )
    for name in ("num_coalitions", "min_coalition", "min_clients"):
        value = getattr(config, name)
        if value is not None and value > cohort:
            raise ConfigError(
                f"--{name}={value}: a round has {cohort} clients; give at most {cohort}."
            )
    return cohort


def _check_values(config: Config):
    for item in dataclasses.fields(Config):
        value, choices = getattr(config, item.name), item.metadata["choices"]
        if choices and value is not None and value not in choices:
            yield f"--{item.name}={value}: not known; choose one of {', '.join(choices)}."
        if isinstance(value, float) and not math.isfinite(value):
            yield f"--{item.name}={value}: give a finite number."
    at_least = {
        "rounds": 1, "clients_per_round": 1, "epochs": 1, "batch_size": 1, "lookback": 1,
        "horizon": 1, "num_coalitions": 1, "min_coalition": 1, "fleet_clients": 1,
        "fleet_days": 60, "chunk": 0, "devices": 0, "seed": 0, "mu": 0, "alpha": 0, "epsilon": 0,
        "active_factor": 0, "min_days": 0,
        "num_clients": 1, "shards_per_client": 1, "min_samples": 1, "max_samples": 1,
        "min_clients": 1, "select_decay": 0,
        "finetune_epochs": 0, "rounds_per_sync": 1,
    }  # fmt: skip
    for name, smallest in at_least.items():
        value = getattr(config, name)
        if value is not None and value < smallest:
            yield f"--{name}={value}: give {smallest} or more."
    for name in ("learning_rate", "server_lr"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            yield f"--{name}={value}: give a number above 0."
    if config.dropout < 0 or config.dropout >= 1:
        yield f"--dropout={config.dropout}: give a share from 0 to below 1."
    for name in ("drop_rate", "straggler_rate", "attack_share"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            yield f"--{name}={value}: give a share from 0 to 1."
    if config.trim is not None and not 0 <= config.trim < 0.5:
        yield f"--trim={config.trim}: give a share from 0 to below 0.5."
    if not 0.5 <= config.damping < 1:
        yield f"--damping={config.damping}: give a share from 0.5 to below 1."
    if config.quantile is not None and (config.quantile <= 0 or config.quantile >= 1):
        yield f"--quantile={config.quantile}: give a level between 0 and 1."
    if config.alpha_dirichlet is not None and not 0 < config.alpha_dirichlet <= 1e6:
        yield f"--alpha_dirichlet={config.alpha_dirichlet}: give a number above 0, up to 1e6."
    if config.image_shape and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){1,2}", config.image_shape):
        yield (
            f"--image_shape={config.image_shape}: give height,width or height,width,channels, "
            "such as 28,28."
        )
    if config.seed >= 2**31:
        yield f"--seed={config.seed}: give a number below 2147483648."
    for name in ("opinion_leaves", "personal_layers"):
        try:
            re.compile(getattr(config, name))
        except re.error as error:
            value = getattr(config, name)
            yield f"--{name}={value}: no regular expression ({error}); mend it."


def _check_together(config: Config):
    rule = config.rule()
    grouping = rule.grouping
    users = {
        "tau": grouping in ("hk_cosine", "hk_euclidean", "agglomerative"),
        "epsilon": grouping in ("hk_euclidean", "agglomerative"),
        "eps_lower": grouping == "hk_band",
        "eps_upper": grouping == "hk_band",
        "num_coalitions": grouping.startswith("fixed_k"),
        "mu": rule.local == "prox",
        "alpha": rule.local.startswith("perfedavg"),
        "quantile": config.loss == "quantile",
        "server_lr": rule.server_opt != "mean",
        "opinion": grouping not in NO_OPINIONS,
        "preference": grouping == "affinity_propagation",
        "beta": rule.within == "distance",
        "select_decay": rule.select == "distance_decay",
        "min_clients": rule.select == "distance_decay",
        "trim": rule.within == "krum" or rule.average == "trimmed_mean",
        "attack_share": config.attack != "none",
        "attack_scale": config.attack != "none",
    }
    advice = {
        "mu": "--local=prox or --agg=fedprox",
        "alpha": "--agg=perfedavg_fo or perfedavg_hf",
        "quantile": "--loss=quantile",
        "server_lr": "--server_opt=sgd, adam, yogi or adagrad",
        "num_coalitions": "--agg=fixed_k_euclidean or fixed_k_cosine",
        "epsilon": "--agg=hk_euclidean or fedclust",
        "preference": "--agg=wscc",
        "beta": "--within=distance or --agg=fedcw",
        "select_decay": "--select=distance_decay or --agg=fedcw",
        "min_clients": "--select=distance_decay or --agg=fedcw",
        "trim": "--agg=multi_krum or trimmed_mean",
        "attack_share": "--attack=sign_flip, scale or noise",
        "attack_scale": "--attack=sign_flip, scale or noise",
        "eps_lower": "--agg=hk_band",
        "eps_upper": "--agg=hk_band",
        "tau": "--agg=hk_cosine or hk_euclidean",
        "opinion": "a rule with a grouping, such as --agg=hk_cosine",
    }
    yield from _check_task(config)
    for name, used in users.items():
        if getattr(config, name) is not None and not used:
            yield (
                f"--{name}={getattr(config, name)}: --agg={config.agg} does not read it; "
                f"leave it out, or use {advice[name]}."
            )
    with_threshold = grouping.startswith("hk")
    optional = {
        "tau_mode": with_threshold,
        "state_norm": with_threshold,
        "euclid_tau": grouping == "hk_euclidean",
        "opinion_leaves": grouping not in NO_OPINIONS,
        "damping": grouping == "affinity_propagation",
        "linkage": grouping == "agglomerative",
        "distance_scale": rule.within == "distance",
    }
    for name, used in optional.items():
        value, default = getattr(config, name), getattr(Config, name)
        if value != default and not used:
            yield f"--{name}={value}: --agg={config.agg} does not read it; leave it out."
    for name in ("fleet_clients", "fleet_days"):
        if config.data and getattr(config, name) != getattr(Config, name):
            yield (
                f"--{name}={getattr(config, name)}: it shapes the embedded fleet, which --data "
                "replaces; leave one of them out."
            )
    if config.clients and not config.data:
        yield f"--clients={config.clients}: it picks columns of --data; give both."
    # --active_factor and --min_days are in the paper's preset, which also fits the embedded
    # fleet: that stands for households chosen so already.
    for name in ("data_format", "resample", "timezone"):
        if getattr(config, name) != getattr(Config, name) and not config.data:
            yield f"--{name}={getattr(config, name)}: it says how to read --data; give both."
    yield from _check_thresholds(config, grouping)
    yield from _check_choices(config, rule)


def _check_choices(config: Config, rule: Rule):
    """Choices that contradict each other, with the reason."""
    grouping = rule.grouping
    if rule.serve == "coalition" and grouping == "none":
        yield (
            f"--serve=coalition: --agg={config.agg} forms no coalitions; use a rule that does, "
            "such as --agg=hk_cosine, or leave it out."
        )
    if rule.serve == "coalition" and rule.server_opt != "mean":
        yield (
            f"--server_opt={rule.server_opt}: it steps the global model, which nobody is served "
            "with --serve=coalition; use --server_opt=mean or --serve=global."
        )

    if rule.serve == "coalition" and rule.average != "mean":
        yield (
            f"--average={rule.average}: it makes the global model, which nobody is served with "
            "--serve=coalition; use --average=mean or --serve=global."
        )
    control = rule.local.startswith("scaffold")
    if control and rule.serve == "coalition":
        yield (
            f"--local={rule.local}: control variates pull every client to the fleet's optimum, "
            "away from its coalition's; use --serve=global or another --local."
        )
    if rule.align == "neurons":
        moved = {
            "client_opt_reset=False": not config.client_opt_reset,
            f"local={rule.local}": control,
            f"personal_layers={config.personal_layers}": bool(config.personal_layers),
        }
        for flag in (flag for flag, given in moved.items() if given):
            yield (
                f"--{flag}: --align=neurons puts a model's neurons into another order, in which what "
                "a client keeps has no meaning; leave one of them out."
            )
    if rule.select == "pooled":
        alone = {
            f"attack={config.attack}": config.attack != "none",
            f"drop_rate={config.drop_rate}": config.drop_rate > 0,
            f"personal_layers={config.personal_layers}": bool(config.personal_layers),
            f"local={rule.local}": control,
            f"serve={rule.serve}": rule.serve != "global",
            f"clients_per_round={config.clients_per_round}": config.clients_per_round is not None,
        }
        for flag in (flag for flag, given in alone.items() if given):
            yield (
                f"--{flag}: --select=pooled trains one model on the windows of all clients, so "
                "there are no clients that this could mean; leave it out."
            )
    if grouping == "planted" and (config.data or TASK_OF[config.samples] != "forecast"):
        other = f"--data={config.data}" if config.data else f"--samples={config.samples}"
        yield (
            f"{other}: the true groups that --agg={config.agg} uses are known for the embedded "
            "fleet only; use a rule that finds groups, such as --agg=hk_cosine."
        )


def _check_task(config: Config):
    """Refuses what the task does not read, or its way of dealing out samples."""
    task, split = TASK_OF[config.samples], config.partition or SPLITS[0]
    dealt = task == "classification" and config.samples != "leaf"
    readings = (task == "forecast", "--samples=readings")
    classes = (task == "classification", "--samples=digits, mnist5k, npz or leaf")
    dealing = (dealt, "--samples=digits, mnist5k or npz")
    # Whether a flag is read, and what reads it.
    readers = {
        **{item.name: readings for item in _fields_of("Data")},
        "dropout": readings,
        "activation": readings,
        "data": (config.samples not in ("digits", "mnist5k"), "--samples=npz or leaf"),
        "model": classes,
        **{item.name: dealing for item in _fields_of("Classes")},
        "image_shape": (config.samples in ("npz", "leaf"), "--samples=npz or leaf"),
        "max_samples": (config.samples == "npz", "--samples=npz"),
    }
    if dealt:
        readers["alpha_dirichlet"] = (
            split in ("dirichlet", "quantity"),
            "--partition=dirichlet or quantity",
        )
        readers["shards_per_client"] = (split == "shards", "--partition=shards")
    for name, (used, fix) in readers.items():
        if getattr(config, name) != getattr(Config, name) and not used:
            by_split = dealt and name in ("alpha_dirichlet", "shards_per_client")
            who = f"--partition={split}" if by_split else f"--samples={config.samples}"
            yield (
                f"--{name}={getattr(config, name)}: {who} does not read it; leave it out, or use "
                f"{fix}."
            )
    if config.loss is not None and config.loss not in LOSSES_OF[task]:
        yield (
            f"--loss={config.loss}: --samples={config.samples} cannot be trained with it; choose one of "
            f"{', '.join(LOSSES_OF[task])}."
        )


def _fields_of(group: str):
    return [item for item in dataclasses.fields(Config) if item.metadata["group"] == group]


def _check_thresholds(config: Config, grouping: str):
    if config.epsilon is not None:
        for name in ("tau", "euclid_tau", "tau_mode"):
            if getattr(config, name) != getattr(Config, name):
                yield (
                    f"--epsilon={config.epsilon} and --{name}={getattr(config, name)}: one is a "
                    "radius of raw opinions, the other belongs to unit vectors; keep one."
                )
        return
    low, high, meaning = -1.0, 1.0, "a cosine"
    if config.tau_mode == "quantile" or grouping == "agglomerative":
        low, high, meaning = 0.0, 1.0, "a quantile"
    elif grouping == "hk_euclidean" and config.euclid_tau == "radius":
        low, high, meaning = 0.0, 2.0, "a radius on unit vectors"
    for name in ("tau", "eps_lower", "eps_upper"):
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            yield f"--{name}={value}: it is {meaning} here; give a number from {low:g} to {high:g}."
    if grouping == "hk_band":
        lower, upper = value_of(config, "eps_lower"), value_of(config, "eps_upper")
        if lower > upper:
            yield (
                f"--eps_lower={lower} is above --eps_upper={upper}: nobody would be a neighbor; "
                "swap them."
            )
