"""Classes of samples, such as images: cross-entropy, accuracy, and the commonest class."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedjax_hk import metrics
from fedjax_hk.tasks.task import Task, some


def _columns(errors: metrics.ClassErrors) -> dict[str, float]:
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


def _header(unit: str) -> list[str]:
    return [
        "guess", "accuracy %", "std", "median", "worst tenth", "balanced %", "all samples %",
        "loss",
    ]  # fmt: skip


def _cells(errors: metrics.ClassErrors | pd.DataFrame) -> list[str]:
    num = errors.test_samples if isinstance(errors, pd.DataFrame) else errors.num_samples
    accuracy = metrics.spread(np.asarray(errors.accuracy), higher_is_better=True)
    loss = metrics.spread(np.asarray(errors.loss))["mean"]
    shares = (
        *(accuracy[key] for key in ("mean", "std", "median", "worst_tenth")),
        metrics.spread(np.asarray(errors.balanced_accuracy))["mean"],
        _pooled(errors.accuracy, num),
    )
    return [*(f"{100 * share:.1f}" for share in shares), f"{loss:.4f}" if loss == loss else ""]


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
    errors=metrics.class_errors,
    dead=metrics.constant_clients,
    naive_errors=metrics.naive_class_errors,
    columns=_columns,
    headline="accuracy",
    higher_is_better=True,
    samples="samples",
    judged="their own test samples",
    naive="guess without a model",
    naive_names={"majority_class": "the client's commonest training class"},
    line=_line,
    header=_header,
    cells=_cells,
    amount=lambda difference, unit: f"{100 * difference:.3g} points of accuracy",
    troubles=_troubles,
)
