"""Run folders made without training, by the functions that a run writes its tables with."""

from __future__ import annotations

import functools

import numpy as np

from fedjax_hk import data, hk
from fedjax_hk.report import summary
from fedjax_hk.round.state import RoundInfo, Traffic
from fedjax_hk.rules import CHOICES
from fedjax_hk.run import contents
from fedjax_hk.settings.config import Config
from fedjax_hk.store import records, run_folder
from fedjax_hk.tasks import TASKS

CLIENTS = 8
HOSTILE = "<script>alert(1)</script>&\"'$x^2$"


@functools.cache
def fleet_of(num: int = CLIENTS):
    return data.build_fleet(data.synthetic_fleet(num, 75))


@functools.cache
def classes_of(num: int = CLIENTS):
    """A fleet of four classes, in other shares at every client."""
    rng = np.random.default_rng(0)
    labels, test = rng.integers(0, 4, 40 * num), rng.integers(0, 4, 20 * num)
    samples = data.Labelled(
        labels[:, None].astype(np.float32), labels, test[:, None].astype(np.float32), test,
        ("cat", HOSTILE, "dog", "owl"), "made-up classes", "0" * 64,
    )  # fmt: skip
    return data.partition_samples(
        samples, data.Partition(num_clients=num, alpha=0.5, min_samples=3)
    )


def outputs_of(fleet, noise: float, rng) -> np.ndarray:
    """The targets with noise: forecasts, or logits of the classes."""
    targets = fleet.test.targets
    if fleet.classes:
        targets = 1.0 * (targets[..., None] == np.arange(len(fleet.classes)))
    return (targets + noise * rng.standard_normal(targets.shape)).astype(np.float32)


def opinions_of(num: int, seed: int = 0) -> np.ndarray:
    """`[S, 5]`: two coalitions, and the last client on its own."""
    rng = np.random.default_rng(seed)
    means = np.eye(5)[np.where(np.arange(num) % 2 == 0, 0, 1)]
    means[-1] = np.eye(5)[2] if num > 2 else means[-1]
    return means + 0.1 * rng.standard_normal((num, 5))


def make_run(
    path,
    config=None,
    *,
    fleet=None,
    rounds=2,
    error=0.1,
    seed=0,
    finish=True,
    masked=(),
    outputs_nw=None,
    **changes,
):
    """Writes a run folder as a run does.

    Args:
      error: standard deviation of the outputs from the (scaled) readings or the classes.
      finish: False for a run that was stopped after its last round.
      masked: places that do not take part in the last round.
      outputs_nw: what the models say at the end, instead of the outputs that were judged.
      changes: entries of the rounds' `RoundInfo`.
    """
    fleet = fleet or fleet_of()
    config = config or Config(opinion="update", tau=0.5, rounds=rounds, seed=seed)
    num, rule = len(fleet.client_ids), config.rule()
    rng = np.random.default_rng(seed)
    with run_folder.create_folder(path) as folder:
        contents.begin(folder, config, fleet)
        for number in range(1, rounds + 1):
            opinions = opinions_of(num, seed + number).astype(np.float32)
            present = np.ones(num, bool)
            present[list(masked) if number == rounds else []] = False
            grams = {name: hk.gram_matrix(opinions, mask=present) for name in records_spaces()}
            labels = np.where(np.arange(num) % 2 == 0, 0, 1)
            labels[-1] = num - 1 if num > 2 else labels[-1]
            if rule.grouping == "none":
                labels[:] = 0
            if rule.grouping == "singletons":
                labels = np.arange(num)
            labels[~present] = -1
            outputs = outputs_of(fleet, error / number, rng)
            limit = 0.5 if rule.grouping.startswith("hk") else np.nan
            values = {name: np.float32(0.5) for name in RoundInfo._fields} | {
                "cohort_s": np.arange(num), "present_s": present, "finite_s": present,
                "labels_s": labels, "weights_s": present / present.sum(),
                "loss_s": np.ones(num), "num_coalitions": len(set(labels[present])),
                "num_steps": np.int32(2), "converged": np.bool_(True), "limit": np.float32(limit),
                "changes_nothing": np.bool_(False), "dissimilarity_q": np.linspace(0, 1, 5),
                "dead_n": np.zeros(num, bool),
                "sampled_s": np.ones(num, bool), "reported_s": present,
                "attacker_s": np.zeros(num, bool), "steps_s": np.full(num, 10),
                "finetuned_errors": (),
                "errors": TASKS[fleet.task].judge.errors(outputs, fleet.test),
            }  # fmt: skip
            values["errors"] = type(values["errors"])(*map(np.asarray, values["errors"]))
            info = RoundInfo(**values | changes)
            folder.append_rows("coalitions", records.coalition_rows(number, info, fleet))
            folder.append_rows(
                "rounds", [records.round_row(number, info, fleet, 0.5, Traffic(4, 4))]
            )
        if finish:
            told = outputs if outputs_nw is None else outputs_nw
            contents.end(folder, config, fleet, rounds, info, told, grams)
    return folder.path


def records_spaces():
    return CHOICES["opinion"]


__all__ = ["CLIENTS", "HOSTILE", "fleet_of", "make_run", "opinions_of", "records", "summary"]
