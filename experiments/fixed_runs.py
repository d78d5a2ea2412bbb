"""A fixed set of small runs, kept by one version and compared with another's, number by number.

    python experiments/fixed_runs.py --output=before
    python experiments/fixed_runs.py --output=after
    python experiments/fixed_runs.py --compare=before,after

Every rule on forecasts and on digits, and what composes with rules: opinion spaces, thresholds,
serving, attacks, personal layers, kept optimizers, resuming in the middle; two rounds each. Tables
are compared cell by cell: equal to the last bit, or by how much not. Compiled with few
optimizations, as compiling is nearly all of the time (some 15 minutes on two cores).
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import shutil
import sys

import numpy as np
import pandas as pd
from absl import app, flags, logging

from fedjax_hk.rules import RULES

FLAGS = flags.FLAGS
flags.DEFINE_string("output", "", "folder for the run folders")
flags.DEFINE_list("compare", [], "two such folders")
flags.DEFINE_string("only", "", "runs whose name contains this")

BASE = ("--rounds=2", "--epochs=1", "--devices=2", "--noreport")
COHORT = ("--clients_per_round=6",)
READINGS = ("--fleet_clients=9", "--fleet_days=90")
DIGITS = ("--samples=digits", "--model=mlp", "--num_clients=8")
UPDATE = ("--agg=hk_cosine", "--opinion=update")
QUANTILE = (*UPDATE, "--tau_mode=quantile", "--tau=0.6")
EUCLID = ("--agg=hk_euclidean", "--opinion=update")
FEDAVG = ("--agg=fedavg",)
MORE = {
    "update": (*UPDATE, "--tau=0.5"),
    "centered": ("--agg=hk_cosine", "--opinion=centered", "--tau=0.5"),
    "quantile_coalition": (*QUANTILE, "--serve=coalition"),
    "euclid_epsilon": (*EUCLID, "--epsilon=0.05", "--serve=coalition"),
    "euclid_matched": (*EUCLID, "--euclid_tau=matched", "--tau=0.5"),
    "euclid_linear": (*EUCLID, "--euclid_tau=linear", "--tau=0.5"),
    "band_quantile": (
        "--agg=hk_band", "--opinion=update", "--tau_mode=quantile", "--eps_lower=0.5",
        "--eps_upper=1.0",
    ),
    "state_norm": (*UPDATE, "--tau=0.5", "--state_norm=every_step"),
    "fixed_k_coalition": ("--agg=fixed_k_cosine", "--serve=coalition", "--num_coalitions=2"),
    "sign_flip": (*UPDATE, "--tau=0.5", "--attack=sign_flip"),
    "scale": (*FEDAVG, "--attack=scale", "--attack_share=0.4"),
    "noise": ("--agg=multi_krum", "--attack=noise", "--attack_scale=3"),
    "personal": (*FEDAVG, "--personal_layers=output"),
    "personal_coalition": (*QUANTILE, "--serve=coalition", "--personal_layers=output"),
    "kept_optimizer": (*FEDAVG, "--noclient_opt_reset"),
    "kept_optimizer_coalition": (*QUANTILE, "--serve=coalition", "--noclient_opt_reset"),
    "finetune": (*FEDAVG, "--finetune_epochs=2"),
    "disturbed": (*FEDAVG, "--drop_rate=0.3", "--straggler_rate=0.5"),
    "aligned_coalition": ("--agg=wscc", "--align=neurons"),
    "spread": (*FEDAVG, "--gradient_spread"),
    "min_coalition": (*QUANTILE, "--min_coalition=2", "--between=size", "--within=samples"),
    "server_sgd": (*QUANTILE, "--server_opt=sgd", "--server_lr=0.5"),
    "leaves": (*QUANTILE, "--opinion_leaves=output"),
    "scaffold_start": (*FEDAVG, "--local=scaffold_start"),
    "fedclust_epsilon": ("--agg=fedclust", "--epsilon=0.5", "--linkage=ward"),
    "wscc_preference": ("--agg=wscc", "--preference=-0.5", "--damping=0.7"),
    "fedcw_raw": (
        "--agg=fedcw", "--distance_scale=raw", "--beta=-0.2", "--select_decay=0.3",
        "--min_clients=2",
    ),
    "validation": ("--agg=hk_cosine", "--judge=validation"),
    "quantile_loss": (*FEDAVG, "--loss=quantile", "--quantile=0.7"),
    "window_mean": (*FEDAVG, "--scaler=window_mean", "--loss=mae", "--activation=softplus"),
}  # fmt: skip
ON_DIGITS = (
    "update", "quantile_coalition", "sign_flip", "finetune", "disturbed", "kept_optimizer", "spread"
)  # fmt: skip
PARTITIONS = ("shards", "iid", "quantity")
RESUMED = (
    "hk_cosine", "quantile_coalition", "scaffold", "fedcw", "fedadam", "kept_optimizer", "fedclust",
    "personal",
)  # fmt: skip
TABLES = ("rounds", "coalitions", "clients", "forecasts", "predictions", "scaling", "partition")
NOT_COMPARED = ("seconds",)  # columns


def runs() -> dict[str, tuple[str, ...]]:
    """Flags by name."""
    found = {}
    for agg, rule in RULES.items():
        cohort = () if rule.select == "pooled" else COHORT
        found[f"readings_{agg}"] = (*BASE, *cohort, *READINGS, f"--agg={agg}")
        if rule.grouping != "planted":
            found[f"digits_{agg}"] = (*BASE, *cohort, *DIGITS, f"--agg={agg}")
    for name, more in MORE.items():
        found[f"readings_{name}"] = (*BASE, *COHORT, *READINGS, *more)
    for name in ON_DIGITS:
        found[f"digits_{name}"] = (*BASE, *COHORT, *DIGITS, *MORE[name])
    found["digits_personal"] = (*BASE, *COHORT, *DIGITS, *FEDAVG, "--personal_layers=bias")
    for name in PARTITIONS:
        found[f"digits_{name}"] = (*BASE, *COHORT, *DIGITS, *FEDAVG, f"--partition={name}")
    return found


def make(output: pathlib.Path) -> None:
    """Runs what is not there yet."""
    from fedjax_hk.round import engine

    engine.CPU_LEVEL = 0
    for name, arguments in runs().items():
        if FLAGS.only not in name:
            continue
        run(output / name, [arguments])
        if name.removeprefix("readings_") in RESUMED:
            once = ("--rounds=1" if one == "--rounds=2" else one for one in arguments)
            run(output / f"{name}_resumed", [tuple(once), ("--rounds=2",)])


def run(path: pathlib.Path, steps: list[tuple[str, ...]]) -> None:
    """One command after another on one folder, which is resumed by all but the first."""
    from fedjax_hk import main as main_lib

    if (path / "summary.txt").exists():
        return
    shutil.rmtree(path, ignore_errors=True)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for number, arguments in enumerate(steps):
            folder = f"--resume={path}" if number else f"--output={path}"
            if main_lib.main(["main", *arguments, folder]):
                sys.exit(f"{path.name} {arguments}\n{said.getvalue()}")
    print(path.name, flush=True)
    shutil.rmtree(path / "checkpoints")


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Prints what is not equal to the last bit; returns how many runs are not."""
    names = sorted(path.name for path in before.iterdir() if (path / "summary.txt").exists())
    other = 0
    for name in names:
        found = differences(before / name, after / name)
        other += bool(found)
        for where, difference in found.items():
            print(f"{name}: {where}: {difference}")
    print(f"{len(names)} runs, of which {len(names) - other} equal to the last bit")
    return other


def differences(before: pathlib.Path, after: pathlib.Path) -> dict[str, str]:
    """Where a run differs, and by how much of the column's largest number."""
    found = {}
    for table in TABLES:
        paths = [folder / f"{table}.csv" for folder in (before, after)]
        if not any(path.exists() for path in paths):
            continue
        if not all(path.exists() for path in paths):
            found[table] = "only in one"
            continue
        one, other = (pd.read_csv(path, dtype=str, na_filter=False) for path in paths)
        if list(one.columns) != list(other.columns) or len(one) != len(other):
            found[table] = f"other columns or rows: {sorted({*one} ^ {*other})}"
            continue
        for column in one.columns.difference(NOT_COMPARED):
            if not one[column].equals(other[column]):
                numbers = (
                    pd.to_numeric(cells, errors="coerce").to_numpy(float)
                    for cells in (one[column], other[column])
                )
                found[f"{table}.{column}"] = apart(*numbers)
    arrays = [np.load(folder / "opinions.npz") for folder in (before, after)]
    for name in arrays[0].files:
        one, other = (found_in[name] for found_in in arrays)
        if one.tobytes() != other.tobytes():
            found[f"opinions.{name}"] = apart(one, other) if one.dtype.kind == "f" else "differs"
    return found


def apart(one: np.ndarray, other: np.ndarray) -> str:
    """The largest difference, over the largest number."""
    if not (np.isfinite(one) == np.isfinite(other)).all():
        return "other cells are missing"
    return f"{np.nanmax(np.abs(one - other)) / max(np.nanmax(np.abs(one)), 1e-300):.1e}"


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # or jax lists the accelerators it did not find
    if FLAGS.compare:
        sys.exit(compare(*map(pathlib.Path, FLAGS.compare)) > 0)
    if not FLAGS.output:
        sys.exit("Give --output=FOLDER to make the runs, or --compare=BEFORE,AFTER.")
    make(pathlib.Path(FLAGS.output))


if __name__ == "__main__":
    app.run(main)
