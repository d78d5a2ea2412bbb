"""Forecasts of readings: squared errors, liters, and forecasts that need no model."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedjax_hk import metrics
from fedjax_hk.tasks.task import Task, some

NAIVE_NAMES = {
    "yesterday": "the reading before",
    "last_week": "same time last week",
    "mean_7_days": "mean of the last 7 days",
    "train_median": "the client's training median",
}


def _columns(errors: metrics.ClientErrors) -> dict[str, float]:
    """Means over the clients that can be scored; the others are counted: in
    `unscored_clients` if a forecast is not finite, in `unscored_accuracy` also if all
    readings are zero."""
    scored = metrics.spread(errors.mae_units)
    accuracy = metrics.spread(errors.accuracy, higher_is_better=True)
    return {
        "mse": metrics.spread(errors.mse)["mean"],
        "mae": metrics.spread(errors.mae)["mean"],
        "mae_units": scored["mean"],
        "mae_units_std": scored["std"],
        "mae_units_median": scored["median"],
        "mae_units_worst_tenth": scored["worst_tenth"],
        "rmse_units": metrics.spread(errors.rmse_units)["mean"],
        "accuracy": accuracy["mean"],
        "unscored_clients": scored["num_left_out"],
        "unscored_accuracy": accuracy["num_left_out"],
    }


def _header(unit: str) -> list[str]:
    return [
        "forecast", f"MAE {unit}", "std", "median", "worst tenth", f"RMSE {unit}", "accuracy",
        "MSE scaled",
    ]  # fmt: skip


def _cells(errors: metrics.ClientErrors | pd.DataFrame) -> list[str]:
    mae = metrics.spread(np.asarray(errors.mae_units))
    right = metrics.spread(np.asarray(errors.accuracy), higher_is_better=True)["mean"]
    return [
        *(f"{mae[key]:.4g}" for key in ("mean", "std", "median", "worst_tenth")),
        f"{metrics.spread(np.asarray(errors.rmse_units))['mean']:.4g}",
        f"{100 * right:.1f} %",
        f"{metrics.spread(np.asarray(errors.mse))['mean']:.5f}",
    ]


def _troubles(clients: pd.DataFrame) -> list[str]:
    said = []
    unscored = ~np.isfinite(clients["mae_units"])
    if unscored.any():
        said.append(
            f"Clients whose forecasts are not finite, left out of the means: {unscored.sum()}, "
            f"such as {some(clients['client'][unscored])}."
        )
    empty = clients["accuracy"].isna() & ~unscored
    if empty.any():
        said.append(
            f"Clients that read zero throughout their test span: {empty.sum()}, such as "
            f"{some(clients['client'][empty])}. They have no accuracy and count in the other "
            "means."
        )
    dead = int(clients["dead"].sum())
    if dead:
        said.append(
            f"{dead} clients are forecast as zero throughout (dead output); "
            "--activation=softplus cannot die."
        )
    return said


FORECAST = Task(
    errors=metrics.client_errors,
    dead=metrics.dead_clients,
    naive_errors=metrics.naive_errors,
    columns=_columns,
    headline="mae_units",
    higher_is_better=False,
    samples="windows",
    judged="the last fifth of their readings",
    naive="naive forecast",
    naive_names=NAIVE_NAMES,
    line=lambda row, unit: f"MAE {row['mae_units']:.4g} {unit}",
    header=_header,
    cells=_cells,
    amount=lambda difference, unit: f"{difference:.3g} {unit}",
    troubles=_troubles,
)
