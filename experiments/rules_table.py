"""Every rule on one fleet, several seeds: the tables of BUILD_NOTES.md.

    python experiments/rules_table.py --json=embedded.json
    python experiments/rules_table.py --data=daily_litres.csv --unit=L --json=alicante.json

Prints a Markdown table: the MAE is the mean over clients after the last round, its plus-minus
the standard deviation over seeds. Nothing is tuned; every row is a rule as its name says.
"""

from __future__ import annotations

import json
import os
import sys

from absl import app, flags, logging

from fedjax_hk.settings.config import Config

FLAGS = flags.FLAGS
flags.DEFINE_string("data", "", "wide table of readings; empty: the embedded fleet")
flags.DEFINE_string("clients", "", "as in fedjax_hk.main")
flags.DEFINE_string("unit", "", "as in fedjax_hk.main")
flags.DEFINE_integer("rounds", 20, "rounds a run")
flags.DEFINE_integer("seeds", 3, "seeds 0, 1, ...")
flags.DEFINE_list("rows", [], "rows to run; empty: all")
flags.DEFINE_string("json", "", "where to keep the figures")

UPDATE = {"agg": "hk_cosine", "opinion": "update"}
QUANTILE = {"agg": "hk_cosine", "tau_mode": "quantile", "tau": 0.95}
ROWS: dict[str, dict] = {
    "fedavg": {"agg": "fedavg"},
    "fedprox": {"agg": "fedprox"},
    "perfedavg_fo": {"agg": "perfedavg_fo"},
    "perfedavg_hf": {"agg": "perfedavg_hf"},
    "fixed_k_euclidean": {"agg": "fixed_k_euclidean"},
    "fixed_k_cosine": {"agg": "fixed_k_cosine"},
    "hk_euclidean": {"agg": "hk_euclidean"},
    "hk_cosine": {"agg": "hk_cosine"},
    "hk_band": {"agg": "hk_band"},
    "local": {"agg": "local"},
    "scaffold": {"agg": "scaffold"},
    "fedadam": {"agg": "fedadam"},
    "fedyogi": {"agg": "fedyogi"},
    "fedadagrad": {"agg": "fedadagrad"},
    "fednova": {"agg": "fednova"},
    "fedma": {"agg": "fedma"},
    "fedcw": {"agg": "fedcw"},
    "fedcw_select": {"agg": "fedcw_select"},
    "fedcw_weight": {"agg": "fedcw_weight"},
    "wscc": {"agg": "wscc"},
    "fedclust": {"agg": "fedclust"},
    "median": {"agg": "median"},
    "trimmed_mean": {"agg": "trimmed_mean"},
    "multi_krum": {"agg": "multi_krum"},
    "centralized": {"agg": "centralized"},
    "oracle": {"agg": "oracle"},
    "fedavg --personal_layers=output": {"agg": "fedavg", "personal_layers": "output"},
    "fedavg --finetune_epochs=1": {"agg": "fedavg", "finetune_epochs": 1},
    "hk_cosine --opinion=update --tau=0.5": {**UPDATE, "tau": 0.5},
    "hk_cosine --opinion=centered --tau=0.5": {**UPDATE, "opinion": "centered", "tau": 0.5},
    "hk_cosine --tau_mode=quantile --tau=0.95": QUANTILE,
    "hk_cosine --tau_mode=quantile --tau=0.95 --opinion=update": {**QUANTILE, "opinion": "update"},
    "hk_cosine --tau_mode=quantile --tau=0.95 --opinion=centered": {
        **QUANTILE,
        "opinion": "centered",
    },
    "hk_cosine --tau_mode=quantile --tau=0.95 --opinion=update --serve=coalition": {
        **QUANTILE,
        "opinion": "update",
        "serve": "coalition",
    },
}


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # or jax lists the accelerators it did not find
    import numpy as np

    from fedjax_hk import metrics
    from fedjax_hk.run import devices
    from fedjax_hk.run.load import load_fleet
    from fedjax_hk.tasks import forecast_errors

    devices.split_cpu()
    base = Config(data=FLAGS.data, clients=FLAGS.clients, unit=FLAGS.unit, rounds=FLAGS.rounds)
    fleet = load_fleet(base)
    naive = {
        name: float(metrics.spread(np.asarray(errors.mae_units))["mean"])
        for name, errors in forecast_errors.naive_errors(fleet).items()
    }
    done = {}
    if FLAGS.json and os.path.exists(FLAGS.json):
        with open(FLAGS.json) as file:
            done = json.load(file)["rows"]
    for name in FLAGS.rows or ROWS:
        no_truth = ROWS[name]["agg"] == "oracle" and fleet.planted is None
        if name in done or no_truth:
            continue
        done[name] = run_row(name, base, fleet)
        if FLAGS.json:
            with open(FLAGS.json, "w") as file:
                json.dump({"naive": naive, "rows": done}, file, indent=1)
    print_table(naive, done, fleet.unit or "units")


def run_row(name, base, fleet):
    """All seeds of one row: final errors, coalitions and agreement, seconds a round."""
    import dataclasses

    import numpy as np

    from fedjax_hk import metrics
    from fedjax_hk.run import prepare as prepare_lib
    from fedjax_hk.store import records

    prepared = prepare_lib.prepare(dataclasses.replace(base, **ROWS[name]), fleet)
    seeds = []
    for seed in range(FLAGS.seeds):
        prepared = prepare_lib.reseed(prepared, seed)
        rows = []
        for round_number, info, seconds in prepare_lib.rounds(prepared):
            rows.append(records.round_row(round_number, info, fleet, seconds))
        last = rows[-1]
        errors = (
            info.finetuned_errors or info.errors
        )  # after the client's own epochs, if it has some
        mae = metrics.spread(errors.mae_units)
        seeds.append(
            {
                "mae": mae["mean"],
                "mse": metrics.spread(errors.mse)["mean"],
                "accuracy": metrics.spread(errors.accuracy, higher_is_better=True)["mean"],
                "worst_tenth": mae["worst_tenth"],
                "coalitions": [row["num_coalitions"] for row in rows],
                "sizes": last["coalition_sizes"],
                "idle_rounds": sum(row["changes_nothing"] for row in rows),
                "agreement": float(np.mean([row["agreement"] for row in rows])),
                "largest_weight": max(row["largest_weight"] for row in rows),
                "dead": last["dead_clients"],
                "seconds": float(np.median([row["seconds"] for row in rows])),
            }
        )
        print(f"{name} seed {seed}: {seeds[-1]}", file=sys.stderr, flush=True)
    return seeds


def print_table(naive, rows, unit):
    """Markdown."""
    import numpy as np

    header = [
        "rule", f"MAE {unit}", "worst tenth", "MSE scaled", "accuracy", "coalitions a round",
        "idle rounds", "agreement", "largest weight",
    ]  # fmt: skip
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for name, seeds in rows.items():
        of = {key: np.array([seed[key] for seed in seeds]) for key in seeds[0] if key != "sizes"}
        many = of["coalitions"]
        idle = f"{int(of['idle_rounds'].sum())} of {many.size}"
        cells = [
            f"`{name}`",
            f"{of['mae'].mean():.2f} ± {of['mae'].std():.2f}",
            f"{of['worst_tenth'].mean():.1f}",
            f"{of['mse'].mean():.5f}",
            f"{100 * of['accuracy'].mean():.1f} %",
            f"{many.min()} to {many.max()}, median {np.median(many):g}",
            idle,
            f"{of['agreement'].mean():.2f}",
            f"{of['largest_weight'].max():.3f}",
        ]
        print("| " + " | ".join(cells) + " |")
    for name, mae in naive.items():
        print(f"| naive: {name} | {mae:.2f} |" + " |" * (len(header) - 2))


if __name__ == "__main__":
    app.run(main)
