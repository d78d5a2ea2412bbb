"""Whether a household uses more than usual: forecasts, judged by their largest errors."""

from __future__ import annotations

from fedjax_hk import data
from fedjax_hk.settings.config import Config
from fedjax_hk.tasks.forecast import FORECAST
from fedjax_hk.types import Fleet

PEAKS = FORECAST._replace(
    judge=FORECAST.judge._replace(losses={"fourth": lambda y, outputs, q: (y - outputs) ** 4}),
    headline=FORECAST.headline._replace(column="rmse_units", name="root mean square error"),
)


def load(config: Config) -> Fleet:
    """The embedded fleet, for this task."""
    return data.build_fleet(data.synthetic_fleet())._replace(task="peaks")
