"""What may be chosen: for each choice its code, itself in words, and the settings it reads.

To add one, write its code and add its entry here: flags, checks, report and engine read it.
Nothing is loaded before `implementation` is asked for it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

# What words are made from: values of settings by name, and the phrases of `words.Phrases`.
Said = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One thing that may be chosen.

    Attributes:
      words: a sentence or phrase of the report, with `{setting}` where its value goes, or a
        function that makes it; empty where there is nothing to say.
      code: where it is, `module:attribute`; empty where its users branch on the name.
      reads: settings that mean something under this choice; a capitalized name is a group.
      unset: what a setting is under this choice where it is not given, if not as everywhere.
      looks: of a grouping, whether it looks at opinions; the others group nobody, or as known.
      threshold: of a grouping with one, what is compared (see `thresholds.meaning`).
      output_layer: of a grouping, it compares the output layer only unless told otherwise.
      task: of samples and losses, what is learned.
    """

    words: str | Callable[[Said], str] = ""
    code: str = ""
    reads: tuple[str, ...] = ()
    unset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    looks: bool = False
    threshold: str = ""
    output_layer: bool = False
    task: str = ""


def implementation(table: str, name: str) -> Any:
    """The code of a choice, loaded when first asked for.

    Args:
      table: a key of `TABLES`, such as `grouping`.
      name: a key of that table.
    """
    module, attribute = TABLES[table][name].code.split(":")
    return getattr(importlib.import_module(module), attribute)


_RULES = "fedjax_hk.rules."


def _looking(words: str, code: str, *reads: str, **more: Any) -> Choice:
    """A grouping that compares opinions."""
    reads = ("opinion", "opinion_leaves", *reads)
    return Choice(words, _RULES + code, reads, looks=True, **more)


_LISTENING = (
    "Clients compare {opinions} and listen to each other if {near}; who ends up at one opinion is "
    "a coalition."
)
_CENTERS = "Clients are grouped around {num_coalitions:g} centers by the %s of {opinions}."

GROUPINGS: dict[str, Choice] = {
    "none": Choice(
        lambda said: (
            "No coalitions: one model is trained on the samples of all clients at once; nothing is "
            "federated."
            if said["select"] == "pooled"
            else "No coalitions: the server makes one model of all that it gets."
        ),
        _RULES + "grouping:together",
    ),
    "singletons": Choice(
        "No federation: every client trains alone.", _RULES + "grouping:singletons"
    ),
    "hk_cosine": _looking(
        _LISTENING, "hegselmann_krause:hk_cosine", "tau", "tau_mode", "state_norm",
        threshold="cosine",
    ),
    "hk_euclidean": _looking(
        _LISTENING, "hegselmann_krause:hk_euclidean",
        "tau", "epsilon", "tau_mode", "euclid_tau", "state_norm", threshold="ball",
    ),
    "hk_band": _looking(
        _LISTENING, "hegselmann_krause:hk_band",
        "eps_lower", "eps_upper", "tau_mode", "state_norm", threshold="band",
    ),
    "fixed_k_euclidean": _looking(
        _CENTERS % "distance", "fixed_k:fixed_k_euclidean", "num_coalitions"
    ),
    "fixed_k_cosine": _looking(_CENTERS % "cosine", "fixed_k:fixed_k_cosine", "num_coalitions"),
    "affinity_propagation": _looking(
        "Clients choose exemplars among themselves by affinity propagation on the cosines of "
        "{opinions}; who chooses the same one is a coalition.",
        "affinity_propagation:wscc", "preference", "damping",
    ),
    "agglomerative": _looking(
        "Clients are grouped once, in the first round, by {opinions}: groups closer than {near} "
        "merge ({linkage} linkage). Newcomers join the nearest group.",
        "fedclust:fedclust", "tau", "epsilon", "linkage",
        threshold="merge", output_layer=True, unset={"tau": 0.5},
    ),
    "planted": Choice(
        "Coalitions are the true groups that the embedded fleet was made with; its outliers are "
        "alone.",
        _RULES + "grouping:planted",
    ),
}  # fmt: skip

_META = (
    "Training looks for a model that adapts to a client in one step (Per-FedAvg, %s, "
    "alpha = {alpha:g})."
)
_CONTROL = "Control variates take each client's drift out of its gradients (SCAFFOLD, option %s)."

LOCAL: dict[str, Choice] = {
    "plain": Choice(code=_RULES + "local:plain"),
    "prox": Choice(
        "Training is pulled back to the round's start (FedProx, mu = {mu:g}).",
        _RULES + "local:prox",
        ("mu",),
    ),
    "perfedavg_fo": Choice(_META % "first-order", _RULES + "local:perfedavg_fo", ("alpha",)),
    "perfedavg_hf": Choice(_META % "with the Hessian", _RULES + "local:perfedavg_hf", ("alpha",)),
    "scaffold": Choice(_CONTROL % "II", _RULES + "local:scaffold"),
    "scaffold_start": Choice(_CONTROL % "I", _RULES + "local:scaffold_start"),
}

WITHIN: dict[str, Choice] = {
    "uniform": Choice("clients weigh the same"),
    "samples": Choice("clients weigh by their training samples"),
    "distance": Choice(
        lambda said: (
            "clients weigh by their training samples, and "
            f"{'less' if said['beta'] < 0 else 'more'} the farther their models went "
            f"(beta = {said['beta']:g})"
        ),
        reads=("beta", "distance_scale"),
    ),
    "krum": Choice(
        lambda said: (
            f"the models of {100 * said['trim']:.3g} % of the clients, those that are far from "
            "the others, do not count (multi-Krum)"
        ),
        reads=("trim",),
    ),
}

BETWEEN: dict[str, Choice] = {
    "equal": Choice("every coalition weighs the same"),
    "size": Choice("coalitions weigh by their members"),
    "samples": Choice("coalitions weigh by their training samples"),
}

SERVE: dict[str, Choice] = {
    "global": Choice("the one global model", _RULES + "serve:global_model"),
    "coalition": Choice(
        lambda said: (
            "its own model"
            if said["grouping"] == "singletons"
            else "the model of its own coalition"
        ),
        _RULES + "serve:own_coalition",
    ),
}

SELECT: dict[str, Choice] = {
    "uniform": Choice(code=_RULES + "selection:uniform"),
    "distance_decay": Choice(
        "Who takes part: those whose models went farthest, fewer each round (by the factor "
        "exp(-{select_decay:g})).",
        _RULES + "selection:distance_decay",
        ("select_decay", "min_clients"),
    ),
    "pooled": Choice(code=_RULES + "selection:everything"),
}

ALIGN: dict[str, Choice] = {
    "none": Choice(),
    "neurons": Choice(
        "Hidden neurons are matched to the global model's before anything is averaged (FedMA)."
    ),
}

OPINION: dict[str, Choice] = {
    "weights": Choice("the weights of their trained models", _RULES + "opinions:weights"),
    "update": Choice("what they learned in the round", _RULES + "opinions:update"),
    "centered": Choice("their weights minus the mean", _RULES + "opinions:centered"),
}

AVERAGE: dict[str, Choice] = {
    "mean": Choice("the mean of the clients' models", _RULES + "averages:mean"),
    "nova": Choice(
        "the mean of updates that are divided by their local steps (FedNova)",
        _RULES + "averages:nova",
    ),
    "median": Choice(
        "the median of the clients' models, parameter by parameter", _RULES + "averages:median"
    ),
    "trimmed_mean": Choice(
        lambda said: (
            f"the mean of the clients' models without {100 * said['trim']:.3g} % of them at each "
            "end, parameter by parameter"
        ),
        _RULES + "averages:trimmed_mean",
        ("trim",),
    ),
}


def _step(title: str, code: str, **unset: float) -> Choice:
    words = (
        f"The server takes its distance to the last model for a gradient of {title}, learning "
        "rate {server_lr:g}."
    )
    return Choice(words, f"{_RULES}server:{code}", ("server_lr",), unset)


SERVER_OPT: dict[str, Choice] = {
    "mean": Choice(code=_RULES + "server:mean"),
    "sgd": _step("SGD", "sgd"),
    "adam": _step("Adam", "adam", server_lr=0.01),
    "yogi": _step("Yogi", "yogi", server_lr=0.01),
    "adagrad": _step("Adagrad", "adagrad", server_lr=0.01),
}

_ATTACK, _UPLINK = ("attack_share", "attack_scale"), "fedjax_hk.round.uplink:"
ATTACK: dict[str, Choice] = {
    "none": Choice(),
    "sign_flip": Choice(code=_UPLINK + "sign_flip", reads=_ATTACK),
    "scale": Choice(code=_UPLINK + "scale", reads=_ATTACK),
    "noise": Choice(code=_UPLINK + "noise", reads=_ATTACK),
}

TASK: dict[str, Choice] = {
    "forecast": Choice(code="fedjax_hk.tasks.forecast:FORECAST", unset={"loss": "mse"}),
    "classification": Choice(
        code="fedjax_hk.tasks.classification:CLASSIFICATION", unset={"loss": "cross_entropy"}
    ),
}

_DEALT = ("model", "partition", "num_clients", "min_samples")  # samples are dealt out to clients
_LOAD = "fedjax_hk.run.load:"
SAMPLES: dict[str, Choice] = {
    "readings": Choice(
        code=_LOAD + "readings", reads=("Data", "dropout", "activation"), task="forecast"
    ),
    "digits": Choice(code=_LOAD + "digits", reads=_DEALT, task="classification"),
    "mnist5k": Choice(code=_LOAD + "mnist5k", reads=_DEALT, task="classification"),
    "npz": Choice(
        code=_LOAD + "npz",
        reads=("data", *_DEALT, "image_shape", "max_samples"),
        task="classification",
    ),
    "leaf": Choice(
        code=_LOAD + "leaf", reads=("data", "model", "image_shape"), task="classification"
    ),
}

PARTITION: dict[str, Choice] = {
    "dirichlet": Choice(reads=("alpha_dirichlet",)),
    "shards": Choice(reads=("shards_per_client",)),
    "iid": Choice(),
    "quantity": Choice(reads=("alpha_dirichlet",)),
}

LOSS: dict[str, Choice] = {
    "mse": Choice(task="forecast"),
    "mae": Choice(task="forecast"),
    "huber": Choice(task="forecast"),
    "quantile": Choice(reads=("quantile",), task="forecast"),
    "cross_entropy": Choice(task="classification"),
}

# What reads a setting that is itself a choice comes before that choice.
TABLES: dict[str, dict[str, Choice]] = {
    "grouping": GROUPINGS, "local": LOCAL, "within": WITHIN, "between": BETWEEN, "serve": SERVE,
    "select": SELECT, "align": ALIGN, "opinion": OPINION, "average": AVERAGE,
    "server_opt": SERVER_OPT, "samples": SAMPLES, "task": TASK, "loss": LOSS,
    "partition": PARTITION, "attack": ATTACK,
}  # fmt: skip
