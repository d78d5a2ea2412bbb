"""What a federation learns: each task is one record, and engine, tables and words read it.

To add a task, add a module with a `Task` and a row to `TASKS`; its training losses are
entries of `local_training.LOSSES`.
"""

from fedjax_hk.tasks.classification import CLASSIFICATION
from fedjax_hk.tasks.forecast import FORECAST
from fedjax_hk.tasks.task import Curve, Task, Trait

TASKS: dict[str, Task] = {"forecast": FORECAST, "classification": CLASSIFICATION}

__all__ = ["CLASSIFICATION", "FORECAST", "TASKS", "Curve", "Task", "Trait"]
