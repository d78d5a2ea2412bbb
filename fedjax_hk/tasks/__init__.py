"""What a federation learns: each task is one record, and training, engine, tables and words
read it.

To add a task, add a module with a `Task`, and entries of `task`, `samples` and `loss` to
`settings.choices`.
"""

from fedjax_hk.settings.choices import TABLES, implementation
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

TASKS: dict[str, Task] = {name: implementation("task", name) for name in TABLES["task"]}

__all__ = [
    "CLASSIFICATION", "FORECAST", "TASKS", "Curve", "Headline", "Judge", "Loss", "SideMetric",
    "Tables", "Task", "Trait", "Words",
]  # fmt: skip
