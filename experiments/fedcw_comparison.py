"""The FedCW paper's comparison on images under Dirichlet splits: the tables of BUILD_NOTES.md.

    python experiments/fedcw_comparison.py --results=fedcw_mlp --picture=fedcw_mlp.png
    python experiments/fedcw_comparison.py --results=fedcw_cnn --model=cnn --epochs=1

Every method that has a number of its own chooses it for each alpha from a small grid, by the
accuracy on a validation part of seed 0 (`--judge=validation`: the test samples are put away);
then all seeds run on all training samples and are judged on the test samples. Who gets which
samples follows the seed. Every client takes part in every round, unless a method says otherwise.

Each method and alpha is a file in `--results`; what is there is not computed again, so two
processes may share the work with `--methods`. Prints Markdown tables of all files.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys

from absl import app, flags, logging

from fedjax_hk.settings.config import Config

FLAGS = flags.FLAGS
METHODS = {  # the flags that are chosen, with their grid
    "fedavg": {},
    "fedprox": {"mu": (0.001, 0.01, 0.1)},
    "scaffold": {},
    "fedadam": {"server_lr": (0.001, 0.01, 0.1)},
    "fednova": {},
    "fedma": {},
    "fedcw_select": {"select_decay": (0.01, 0.05, 0.1)},
    "fedcw_weight": {"beta": (-0.5, 0.1, 0.5)},
    "fedcw": {"select_decay": (0.01, 0.05, 0.1), "beta": (-0.5, 0.1, 0.5)},
}
flags.DEFINE_string("results", "fedcw_comparison", "folder of the figures")
flags.DEFINE_string("picture", "", "PNG of the accuracy by round")
flags.DEFINE_enum("task", "mnist5k", ["digits", "mnist5k"], "images")
flags.DEFINE_enum("model", "mlp", ["mlp", "cnn"], "network")
flags.DEFINE_integer("epochs", 2, "local epochs")
flags.DEFINE_integer("rounds", 30, "rounds a run")
flags.DEFINE_integer("seeds", 3, "seeds 0, 1, ...")
flags.DEFINE_integer("num_clients", 20, "clients")
flags.DEFINE_list("alphas", ["0.1", "0.5", "1", "10"], "concentrations of the Dirichlet splits")
flags.DEFINE_list("methods", list(METHODS), "methods to run; the tables have all that there are")
flags.DEFINE_float("target", 0.85, "accuracy whose first round is reported")


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # or jax lists the accelerators it did not find
    unknown = sorted(set(FLAGS.methods) - set(METHODS))
    if unknown:
        raise app.UsageError(f"--methods={unknown[0]}: choose from {', '.join(METHODS)}.")

    from tqdm import tqdm

    from fedjax_hk.run import devices

    devices.split_cpu()

    folder = pathlib.Path(FLAGS.results)
    folder.mkdir(parents=True, exist_ok=True)
    cells = list(itertools.product(FLAGS.methods, FLAGS.alphas))
    cells = [cell for cell in cells if not (folder / _name(*cell)).exists()]
    fleets = load_fleets() if cells else {}
    bar = tqdm(total=sum(runs_of(method) for method, _ in cells), file=sys.stderr)
    for method, cells_of_method in itertools.groupby(cells, key=lambda cell: cell[0]):
        prepared = None  # one compilation a method
        for _, alpha in cells_of_method:
            prepared, found = run_cell(method, alpha, fleets, prepared, bar)
            (folder / _name(method, alpha)).write_text(json.dumps(found, indent=1))
    bar.close()
    print_tables(folder)
    if FLAGS.picture:
        draw(folder, FLAGS.picture)


def _name(method: str, alpha: str) -> str:
    return f"{method}_{alpha}.json"


def runs_of(method: str) -> int:
    """Runs of a method at one alpha."""
    choices = len(list(grid_of(method)))
    return FLAGS.seeds + (choices if choices > 1 else 0)


def grid_of(method: str):
    """The flags of each point of a method's grid."""
    names = list(METHODS[method])
    for values in itertools.product(*METHODS[method].values()):
        yield dict(zip(names, values, strict=True))


def config_of(method: str, alpha: str, seed: int, judge: str, numbers: dict) -> Config:
    return Config(
        task=FLAGS.task, model=FLAGS.model, agg=method, epochs=FLAGS.epochs, rounds=FLAGS.rounds,
        num_clients=FLAGS.num_clients, alpha_dirichlet=float(alpha), seed=seed, judge=judge,
        **numbers,
    )  # fmt: skip


def load_fleets() -> dict[tuple, object]:
    """Every partition, padded to one width, so that one program runs them all."""
    from fedjax_hk import data

    samples = {"digits": data.digits, "mnist5k": data.mnist5k}[FLAGS.task]()
    samples = {"test": samples, "validation": data.without_test_samples(samples)}
    found = {}
    for alpha in FLAGS.alphas:
        wanted = [(seed, "test") for seed in range(FLAGS.seeds)] + [(0, "validation")]
        for seed, judge in wanted:
            partition = data.Partition(num_clients=FLAGS.num_clients, alpha=float(alpha), seed=seed)
            found[alpha, seed, judge] = data.partition_samples(samples[judge], partition)
    width = {
        part: max(getattr(fleet, part).mask.shape[1] for fleet in found.values())
        for part in ("train", "test")
    }
    return {
        key: fleet._replace(**{part: widened(getattr(fleet, part), width[part]) for part in width})
        for key, fleet in found.items()
    }


def widened(samples, width: int):
    """The same samples with more padding."""
    import numpy as np

    def pad(array):
        return np.pad(
            array, ((0, 0), (0, width - array.shape[1]), *((0, 0),) * (array.ndim - 2))
        )  # fmt: skip

    return type(samples)(*(pad(field) if len(field) else field for field in samples))


def run_cell(method, alpha, fleets, prepared, bar):
    """A method at one alpha: its numbers chosen on the validation part, then all seeds."""
    scores = []
    numbers = next(grid_of(method))
    if runs_of(method) > FLAGS.seeds:
        for point in grid_of(method):
            prepared, rows = run(method, alpha, 0, "validation", point, fleets, prepared, bar)
            scores.append({**point, "accuracy": rows[-1]["accuracy"]})
        best = max(scores, key=lambda score: score["accuracy"])  # of equal ones the first
        numbers = {name: best[name] for name in METHODS[method]}
    seeds = []
    for seed in range(FLAGS.seeds):
        prepared, rows = run(method, alpha, seed, "test", numbers, fleets, prepared, bar)
        seeds.append(rows)
    return prepared, {"numbers": numbers, "validation": scores, "seeds": seeds}


def run(method, alpha, seed, judge, numbers, fleets, prepared, bar):
    """The rounds of one run: accuracy over all test samples, traffic, effective clients."""
    from fedjax_hk.run import prepare as prepare_lib
    from fedjax_hk.store import records

    config, fleet = config_of(method, alpha, seed, judge, numbers), fleets[alpha, seed, judge]
    if prepared is None:
        prepared = prepare_lib.prepare(config, fleet)
    else:
        prepared = prepare_lib.reuse(prepared, config, fleet)
    rows = []
    bar.set_description(f"{method} alpha {alpha} seed {seed} {judge}")
    for round_number, info, seconds in prepare_lib.rounds(prepared):
        row = records.round_row(round_number, info, fleet, seconds, prepared.engine.traffic)
        rows.append(
            {
                "accuracy": row["pooled_accuracy"],
                "worst_tenth": row["accuracy_worst_tenth"],
                "clients": row["clients"],
                "bytes": row["bytes_down"] + row["bytes_up"],
                "steps": row["local_steps"],
                "effective": row["effective_clients"],
                "seconds": seconds,
            }
        )
    bar.update()
    return prepared, rows


def load(folder: pathlib.Path) -> dict[tuple[str, str], dict]:
    """All figures that there are, by method and alpha."""
    cells = itertools.product(METHODS, FLAGS.alphas)
    paths = {cell: folder / _name(*cell) for cell in cells}
    return {cell: json.loads(path.read_text()) for cell, path in paths.items() if path.exists()}


def print_tables(folder: pathlib.Path) -> None:
    """Markdown: accuracy and rounds to the target by alpha, then traffic and chosen numbers."""
    found = load(folder)
    header = ["method", *(f"alpha {alpha}" for alpha in FLAGS.alphas)]
    tables = {
        "Accuracy after the last round, %": last_accuracy,
        f"First round with {100 * FLAGS.target:g} % (runs that reach it)": first_round,
        "Clients a round, MB a round": traffic,
        "Effective clients a round": effective,
        "Chosen on the validation part": chosen,
    }
    for title, cell_text in tables.items():
        print(f"\n{title}:\n\n| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
        for method in METHODS:
            cells = [found.get((method, alpha)) for alpha in FLAGS.alphas]
            if any(cells):
                texts = [cell_text(cell) if cell else "" for cell in cells]
                print("| " + " | ".join([f"`{method}`", *texts]) + " |")


def last_accuracy(cell) -> str:
    """Mean and standard deviation over seeds."""
    import numpy as np

    last = np.array([100 * rows[-1]["accuracy"] for rows in cell["seeds"]])
    return f"{last.mean():.1f} ± {last.std():.1f}"


def first_round(cell) -> str:
    """Mean over the seeds that reach the target."""
    firsts = []
    for rows in cell["seeds"]:
        reached = [number for number, row in enumerate(rows, 1) if row["accuracy"] >= FLAGS.target]
        firsts += reached[:1]
    if not firsts:
        return "never"
    many = len(cell["seeds"])
    some = "" if len(firsts) == many else f" ({len(firsts)} of {many})"
    return f"{sum(firsts) / len(firsts):.1f}{some}"


def traffic(cell) -> str:
    """Means over rounds and seeds."""
    rows = [row for rows in cell["seeds"] for row in rows]
    clients, size = (sum(row[key] for row in rows) / len(rows) for key in ("clients", "bytes"))
    return f"{clients:.1f}, {size / 1e6:.2f}"


def effective(cell) -> str:
    """Mean over rounds and seeds."""
    rows = [row for rows in cell["seeds"] for row in rows]
    return f"{sum(row['effective'] for row in rows) / len(rows):.1f}"


def chosen(cell) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in cell["numbers"].items()) or "-"


def draw(folder: pathlib.Path, path: str) -> None:
    """Accuracy by round, a panel for each alpha, mean over seeds."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fedjax_hk.report.plots import INK, PALETTE, REST

    found = load(folder)
    figure = Figure(figsize=(9.5, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.ravel(
        figure.subplots(2, -(-len(FLAGS.alphas) // 2), sharex=True, sharey=True, squeeze=False)
    )
    colors, dashes = [*PALETTE, REST, REST, INK], ["-"] * 6 + [":", "-.", "--"]
    for alpha, axis in zip(FLAGS.alphas, axes, strict=False):
        for index, method in enumerate(METHODS):
            if (method, alpha) not in found:
                continue
            rows = found[method, alpha]["seeds"]
            mean = np.mean([[100 * row["accuracy"] for row in seed] for seed in rows], axis=0)
            axis.plot(
                np.arange(1, len(mean) + 1), mean, dashes[index], color=colors[index], lw=1.6,
                marker="os^Dv*PX<"[index], ms=4, markevery=(index, 9), label=method,
            )  # fmt: skip
        axis.set_title(f"alpha = {alpha}", loc="left")
        axis.grid(alpha=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-2:]:
        axis.set_xlabel("round")
    axes[0].set_ylabel("accuracy on all test samples, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=5, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    app.run(main)
