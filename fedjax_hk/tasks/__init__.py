"""What a federation learns: each task is one record, and training, engine, tables and words
read it.

To add a task, add a module with a `Task` and a row to `TASKS`.
"""

from fedjax_hk.tasks.classification import CLASSIFICATION
from fedjax_hk.tasks.forecast import FORECAST
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
)

TASKS: dict[str, Task] = {"forecast": FORECAST, "classification": CLASSIFICATION}

__all__ = [
    "CLASSIFICATION", "FORECAST", "TASKS", "Curve", "Headline", "Judge", "Loss", "SideMetric",
    "Tables", "Task", "Trait", "Words",
]  # fmt: skip
