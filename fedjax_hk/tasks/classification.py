"""Classes of samples, such as images: cross-entropy, accuracy, and the commonest class."""

from __future__ import annotations

import numpy as np
import optax
import pandas as pd

from fedjax_hk import metrics
from fedjax_hk.data.samples.labelled import label_counts
from fedjax_hk.models import classifier
from fedjax_hk.tasks.class_errors import (
    ClassErrors,
    class_errors,
    constant_clients,
    naive_class_errors,
)
from fedjax_hk.tasks.task import (
    Curve,
    Headline,
    Judge,
    Loss,
    SideMetric,
    Tables,
    Task,
    Trait,
    Words,
    mean_of,
    number,
    percent,
    some,
)
from fedjax_hk.types import Fleet

# Of classes `[B]` and logits `[B, C]`; `[B]`.
LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda y, outputs, q: optax.losses.softmax_cross_entropy_with_integer_labels(
        outputs, y
    ),
}


def _columns(errors: ClassErrors) -> dict[str, float]:
    """Means over the clients that can be scored, the others are counted; `pooled_accuracy` is
    the share of all test samples, in which large clients count more."""
    accuracy = metrics.spread(errors.accuracy, higher_is_better=True)
    return {
        "loss": metrics.spread(errors.loss)["mean"],
        "accuracy": accuracy["mean"],
        "accuracy_std": accuracy["std"],
        "accuracy_median": accuracy["median"],
        "accuracy_worst_tenth": accuracy["worst_tenth"],
        "balanced_accuracy": metrics.spread(errors.balanced_accuracy)["mean"],
        "pooled_accuracy": _pooled(errors.accuracy, errors.num_samples),
        "unscored_clients": accuracy["num_left_out"],
    }


def _pooled(accuracy, num_samples) -> float:
    accuracy = np.asarray(accuracy, np.float64)
    num = np.where(np.isfinite(accuracy), num_samples, 0)
    return float(np.nansum(accuracy * num) / num.sum()) if num.any() else float("nan")


def _line(row: dict, unit: str) -> str:
    worst = 100 * row["accuracy_worst_tenth"]
    return f"accuracy {100 * row['accuracy']:.1f} % (worst tenth {worst:.1f})"


def _pooled_of(clients: pd.DataFrame, prefix: str) -> float:
    return _pooled(clients[prefix + "accuracy"], clients["test_samples"])


def prediction_table(logits_nwc: np.ndarray, fleet: Fleet) -> pd.DataFrame:
    """One row a test sample: `predictions.csv`.

    Args:
      logits_nwc: `[N, W_test, C]`.

    Returns:
      client, sample (its place among the source's test samples), actual and predicted class
      (empty for outputs that are not finite), the probability that the model gives its
      prediction, and a column for each guess without a model.
    """
    logits_nwc = np.asarray(logits_nwc, np.float64)
    clients, places = np.nonzero(fleet.test.mask)
    logits_mc = logits_nwc[clients, places]
    known_m = np.isfinite(logits_mc).all(axis=1)
    shares_mc = np.exp(logits_mc - logits_mc.max(axis=1, keepdims=True), where=known_m[:, None],
                       out=np.full_like(logits_mc, np.nan))  # fmt: skip
    shares_mc /= shares_mc.sum(axis=1, keepdims=True)
    names = np.array([*fleet.classes, ""], object)
    columns = {
        "client": np.array(fleet.client_ids, object)[clients],
        "sample": _places(fleet, clients, places),
        "actual": names[fleet.test.targets[clients, places]],
        "predicted": names[np.where(known_m, logits_mc.argmax(axis=1), -1)],
        "probability": shares_mc.max(axis=1),
    }
    guesses = {name: guess_nw[clients, places] for name, guess_nw in fleet.naive.items()}
    return pd.DataFrame(
        columns
        | {n: names[np.where(np.isfinite(g), g, -1).astype(int)] for n, g in guesses.items()}
    )


def _places(fleet: Fleet, clients: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Samples keep the order of their source within each client."""
    if fleet.owners is None:
        return places
    by_client = np.argsort(fleet.owners[1], kind="stable")
    starts_n = np.searchsorted(fleet.owners[1][by_client], np.arange(len(fleet.client_ids)))
    return by_client[starts_n[clients] + places]


def _traits(fleet: Fleet) -> dict[str, np.ndarray]:
    held_nc = label_counts(fleet.train, len(fleet.classes))
    return {"commonest_share": held_nc.max(axis=1) / np.maximum(held_nc.sum(axis=1), 1)}


def _troubles(clients: pd.DataFrame) -> list[str]:
    said = []
    empty = clients["test_samples"] == 0
    if empty.any():
        said.append(
            f"Clients without a test sample, left out of the means: {empty.sum()}, such as "
            f"{some(clients['client'][empty])}."
        )
    unscored = clients["accuracy"].isna() & ~empty
    if unscored.any():
        said.append(
            f"Clients whose outputs are not finite, left out of the means: {unscored.sum()}, "
            f"such as {some(clients['client'][unscored])}."
        )
    dead = int(clients["dead"].sum())
    if dead:
        said.append(
            f"{dead} clients get one output for all of their test samples (dead network); a "
            "smaller --learning_rate may help."
        )
    return said


CLASSIFICATION = Task(
    judge=Judge(
        losses=LOSSES,
        output_shape=lambda fleet: (len(fleet.classes),),
        errors=class_errors,
        dead=constant_clients,
        naive_errors=naive_class_errors,
        network=lambda config, fleet, example: classifier(
            example, len(fleet.classes), config.model
        ),
    ),
    tables=Tables(
        columns=_columns,
        kept=("accuracy", "balanced_accuracy"),
        outputs_name="predictions",
        outputs=prediction_table,
        traits_of=_traits,
    ),
    headline=Headline(
        column="accuracy",
        higher_is_better=True,
        most=1.0,
        factor=100.0,
        unit_of=lambda unit: "%",
        apart_of=lambda unit: "points of accuracy",
        shown=lambda value, unit: f"{100 * value:.1f} %",
        name="accuracy",
        short="accuracy",
        word="accuracy",
        worst="the lowest accuracy",
    ),
    words=Words(
        samples_noun="samples",
        judged="their own test samples",
        naive="guess without a model",
        naive_short="guess",
        naive_names={"majority_class": "the client's commonest training class"},
        side_metrics=(
            SideMetric(
                "balanced_accuracy", lambda unit: "balanced", mean_of("balanced_accuracy"), percent
            ),
            SideMetric("pooled_accuracy", lambda unit: "all samples", _pooled_of, percent),
            SideMetric("loss", lambda unit: "loss", mean_of("loss"), number(".4f")),
        ),
        curves=(
            Curve(
                name="accuracy_per_round",
                title="Accuracy per round",
                caption="Share of a client's own test samples that get the right class: mean "
                "over the clients, median, and mean of the worst tenth; dashed: a guess without a "
                "model. Higher is better.",
                lines={
                    "mean over clients": "accuracy",
                    "median client": "accuracy_median",
                    "worst tenth": "accuracy_worst_tenth",
                },
                naive="accuracy",
                factor=100.0,
                axis=lambda unit: "accuracy, %",
                higher_is_better=True,
            ),
            Curve(
                name="error_per_round",
                title="Error per round",
                caption="Cross-entropy on the clients' own test samples, in nats, mean over the "
                "clients, and of training on those that took part in the round. Lower is better.",
                lines={"test samples": "loss", "training samples": "train_loss"},
                naive="",
                factor=1.0,
                axis=lambda unit: "cross-entropy",
                higher_is_better=False,
            ),
        ),
        traits=(
            Trait("train_samples", "number of samples", lambda value, unit: f"{value:.4g}"),
            Trait(
                "commonest_share",
                "share of the commonest class",
                lambda value, unit: f"{100 * value:.3g} %",
            ),
        ),
        note="Balanced: the accuracy in each class that a client has, averaged over these "
        "classes. All samples: the share of all test samples, in which large clients count more. "
        "Loss: cross-entropy, in nats.",
        line=_line,
        troubles=_troubles,
    ),
)
