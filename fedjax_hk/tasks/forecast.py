"""Forecasts of readings: squared errors, liters, and forecasts that need no model."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from fedjax_hk import metrics
from fedjax_hk.models import lstm_forecaster
from fedjax_hk.tasks.forecast_errors import (
    ClientErrors,
    client_errors,
    dead_clients,
    naive_errors,
    usage,
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

# One number a sample. The losses here, `forecast_errors` and `forecast_table` rely on it:
# several horizons or quantiles begin here.
OUTPUT_SHAPE = ()

# Of targets and outputs `[B]` and the level of the quantile loss; each gives `[B]`.
LOSSES: dict[str, Loss] = {
    "mse": lambda y, outputs, q: (y - outputs) ** 2,
    "mae": lambda y, outputs, q: jnp.abs(y - outputs),
    "huber": lambda y, outputs, q: optax.losses.huber_loss(y - outputs, delta=0.1),
    "quantile": lambda y, outputs, q: jnp.maximum(q * (y - outputs), (q - 1) * (y - outputs)),
}


def _columns(errors: ClientErrors) -> dict[str, float]:
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


def forecast_table(forecast_nw: np.ndarray, fleet: Fleet) -> pd.DataFrame:
    """One row a client and test target: `forecasts.csv`, in units.

    Args:
      forecast_nw: `[N, W_test]` scaled.

    Returns:
      client, time, actual, forecast, and a column for each naive forecast (NaN where it
      cannot be made).
    """
    test = fleet.test
    scale, shift = (np.asarray(x, np.float64) for x in (test.scale, test.shift))
    clients, windows = np.nonzero(test.mask)
    columns = {
        "client": np.array(fleet.client_ids, object)[clients],
        "time": np.datetime_as_string(fleet.test_times[clients, windows], unit="s"),
        "actual": (test.targets * scale + shift)[clients, windows],
        "forecast": (forecast_nw * scale + shift)[clients, windows],
    }
    return pd.DataFrame(
        columns | {name: units_nw[clients, windows] for name, units_nw in fleet.naive.items()}
    )


def _traits(fleet: Fleet) -> dict[str, np.ndarray]:
    mean_n, zero_n = usage(fleet)
    return {"mean_units": mean_n, "zero_share": zero_n}


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
    judge=Judge(
        losses=LOSSES,
        output_shape=lambda fleet: OUTPUT_SHAPE,
        errors=client_errors,
        dead=dead_clients,
        naive_errors=naive_errors,
        network=lambda config, fleet, example: lstm_forecaster(
            example, dropout=config.dropout, output=config.activation
        ),
    ),
    tables=Tables(
        columns=_columns,
        kept=("mae_units", "rmse_units", "accuracy", "mse"),
        outputs_name="forecasts",
        outputs=forecast_table,
        traits_of=_traits,
    ),
    headline=Headline(
        column="mae_units",
        higher_is_better=False,
        most=math.inf,
        factor=1.0,
        unit_of=lambda unit: unit,
        apart_of=lambda unit: unit,
        shown=lambda value, unit: f"{value:.4g} {unit}",
        name="mean absolute error",
        short="MAE",
        word="error",
        worst="the largest errors",
    ),
    words=Words(
        samples_noun="windows",
        judged="the last fifth of their readings",
        naive="naive forecast",
        naive_short="forecast",
        naive_names={
            "yesterday": "the reading before",
            "last_week": "same time last week",
            "mean_7_days": "mean of the last 7 days",
            "train_median": "the client's training median",
        },
        side_metrics=(
            SideMetric("rmse", lambda unit: f"RMSE {unit}", mean_of("rmse_units"), number(".4g")),
            SideMetric("accuracy", lambda unit: "accuracy", mean_of("accuracy"), percent),
            SideMetric("mse_scaled", lambda unit: "MSE scaled", mean_of("mse"), number(".5f")),
        ),
        curves=(
            Curve(
                name="error_per_round",
                title="Error per round",
                caption="Mean absolute error over the clients after each round, and their median; "
                "dashed: naive forecasts, which need no model.",
                lines={"mean over clients": "mae_units", "median client": "mae_units_median"},
                naive="mae_units",
                factor=1.0,
                axis=lambda unit: f"MAE {unit}",
                higher_is_better=False,
            ),
            Curve(
                name="accuracy_per_round",
                title="Accuracy per round",
                caption="Accuracy is 1 minus the sum of absolute errors over the sum of readings, "
                "not below 0; mean over the clients. Higher is better.",
                lines={"mean over clients": "accuracy"},
                naive="accuracy",
                factor=100.0,
                axis=lambda unit: "accuracy, %",
                higher_is_better=True,
            ),
        ),
        traits=(
            Trait("mean_units", "mean use", lambda value, unit: f"{value:.3g} {unit}"),
            Trait("zero_share", "share of zeros", lambda value, unit: f"{100 * value:.3g} %"),
        ),
        note="",
        line=lambda row, unit: f"MAE {row['mae_units']:.4g} {unit}",
        troubles=_troubles,
    ),
)
