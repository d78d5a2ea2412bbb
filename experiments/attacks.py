"""Do Hegselmann-Krause coalitions isolate attackers? A table and a picture.

    python experiments/attacks.py --json=attacks.json --picture=attacks.png
    python experiments/attacks.py --json=attacks.json --norun  # what there is so far

A fifth of the clients sends, in place of its update, ten times it (`scale`), minus ten times
it (`sign_flip`), or noise ten times as long (`noise`). `none` is the same run without: there
the columns on attackers say where the same clients sit, and what they weigh, as honest ones.

Errors are those of honest clients after the last round; the other figures are means over
rounds; both are means over seeds. `attackers' weight` is their part of the model that an honest
client is served: of the global model, or, with --serve=coalition, of its own coalition's. Where
the average is no weighted mean (median, trimmed mean) there is none to speak of.

Nothing is tuned: thresholds are the defaults, or a quantile that was fixed in advance. The cosine
does not see the length of an update, nor does a quantile in any geometry, as it is set on unit
vectors; hk_euclidean with a radius of its own (--epsilon) does.

The embedded fleet is made smaller, 40 clients and a year of days, 20 of them a round, so that ten
rounds take about 9 s of CPU once they are compiled. The output is softplus: under a ReLU the
first attack that works kills the model for good, and from then on all updates are zero.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any, NamedTuple

from absl import app, flags, logging

from fedjax_hk.settings.config import SETTINGS, Config

FLAGS = flags.FLAGS
flags.DEFINE_integer("fleet_clients", 40, "as in fedjax_hk.main", lower_bound=2)
flags.DEFINE_integer("fleet_days", 365, "as in fedjax_hk.main", lower_bound=60)
flags.DEFINE_integer("clients_per_round", 20, "as in fedjax_hk.main", lower_bound=1)
flags.DEFINE_integer("rounds", 10, "rounds a run", lower_bound=1)
flags.DEFINE_enum("activation", "softplus", SETTINGS["activation"].choices, "as in fedjax_hk.main")
flags.DEFINE_float("attack_share", 0.2, "as in fedjax_hk.main", lower_bound=0, upper_bound=1)
flags.DEFINE_float("attack_scale", 10.0, "as in fedjax_hk.main")
flags.DEFINE_integer("seeds", 3, "seeds 0, 1, ...", lower_bound=1)
flags.DEFINE_list("rows", [], "methods to run; empty: all")
flags.DEFINE_integer("devices", 0, "CPU devices; 0: one a core", lower_bound=0)
flags.DEFINE_string("json", "", "where to keep the figures, and to go on from")
flags.DEFINE_string("picture", "", "where to draw the figures (PNG)")
flags.DEFINE_bool("run", True, "run what is missing in --json")

SETTINGS = (
    "fleet_clients", "fleet_days", "clients_per_round", "rounds", "activation", "attack_share",
    "attack_scale", "seeds",
)  # fmt: skip

ANGLE = {"agg": "hk_cosine", "opinion": "update", "tau_mode": "quantile", "tau": 0.95}
LENGTH = {"agg": "hk_euclidean", "opinion": "update", "epsilon": 1.0}
ROWS: dict[str, dict[str, Any]] = {
    "fedavg": {"agg": "fedavg"},
    "median": {"agg": "median"},
    "trimmed_mean": {"agg": "trimmed_mean"},
    "multi_krum": {"agg": "multi_krum"},
    "hk_cosine weights": {"agg": "hk_cosine"},
    "hk_cosine update": ANGLE,
    "hk_cosine update min 2": {**ANGLE, "min_coalition": 2},
    "hk_cosine update served": {**ANGLE, "serve": "coalition"},
    "hk_euclidean update": LENGTH,
    "hk_euclidean update min 2": {**LENGTH, "min_coalition": 2},
    "local": {"agg": "local"},
}
flags.register_validator(
    "rows", lambda rows: set(rows) <= set(ROWS), f"choose from {', '.join(ROWS)}"
)


class Attack(NamedTuple):
    """What is compiled, and factors of --attack_share and --attack_scale, which are traced."""

    kind: str
    share: float = 1.0
    scale: float = 1.0


ATTACKS = {
    "none": Attack("scale", share=0.0),
    "sign_flip": Attack("scale", scale=-1.0),
    "scale": Attack("scale"),
    "noise": Attack("noise"),
}


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # or jax lists the accelerators it did not find
    found = read_kept()
    if FLAGS.run:
        run_missing(found)
    rows = {
        name: {attack: figures(name, seeds) for attack, seeds in by_attack.items()}
        for name, by_attack in found["rows"].items()
        if by_attack
    }
    if not rows:
        raise SystemExit(f"--json={FLAGS.json}: no figures yet; leave out --norun.")
    print_table(rows, found["naive"])
    if FLAGS.picture:
        import attacks_picture

        attacks_picture.write(FLAGS.picture, rows, found["naive"])


def read_kept() -> dict[str, Any]:
    """What --json holds, or the beginning of it."""
    settings = {name: FLAGS[name].value for name in SETTINGS}
    if not (FLAGS.json and os.path.exists(FLAGS.json)):
        return {"settings": settings, "naive": {}, "rows": {name: {} for name in ROWS}}
    with open(FLAGS.json) as file:
        found = json.load(file)
    found["rows"] = {name: found["rows"].get(name, {}) for name in ROWS}  # in this order
    for name, value in found["settings"].items():
        if settings[name] != value:
            raise SystemExit(
                f"--{name}={settings[name]}: {FLAGS.json} was made with {value}; give that, or "
                "another --json."
            )
    return found


def run_missing(found: dict[str, Any]) -> None:
    """Adds what is missing to `found["rows"]`: method, attack, and a record for each seed."""
    from fedjax_hk.run import devices
    from fedjax_hk.run import prepare as prepare_lib
    from fedjax_hk.run.load import load_fleet

    devices.split_cpu(FLAGS.devices)
    shared = ("fleet_clients", "fleet_days", "clients_per_round", "rounds", "activation")
    base = Config(**{name: FLAGS[name].value for name in shared})
    fleet = load_fleet(base)
    found["naive"] = naive_errors(fleet)
    for name in FLAGS.rows or ROWS:
        done = found["rows"][name]
        for kind in ("scale", "noise"):
            missing = [
                attack for attack in ATTACKS if ATTACKS[attack].kind == kind and attack not in done
            ]
            if not missing:
                continue
            config = dataclasses.replace(base, **ROWS[name], attack=kind)
            prepared = prepare_lib.prepare(config, fleet)
            for attack in missing:
                done[attack] = [
                    run_seed(prepared, ATTACKS[attack], seed) for seed in range(FLAGS.seeds)
                ]
                print(f"{name}, {attack}: {done[attack]}", file=sys.stderr, flush=True)
                if FLAGS.json:
                    with open(f"{FLAGS.json}.part", "w") as file:
                        json.dump(found, file, indent=1)
                    os.replace(f"{FLAGS.json}.part", FLAGS.json)


def attackers_of(fleet, seed: int):
    """`[N]` bool, who attacks in the runs of a seed, whether they do or not."""
    import jax
    import numpy as np

    from fedjax_hk import keys
    from fedjax_hk.round import uplink

    ids_n = keys.stable_ids(fleet.client_ids)
    share = np.float32(FLAGS.attack_share)
    return np.asarray(uplink.attackers(jax.random.key(seed), ids_n, share))


def naive_errors(fleet) -> dict[str, float]:
    """MAE of the honest clients' naive forecasts, mean over seeds."""
    import numpy as np

    from fedjax_hk import metrics
    from fedjax_hk.tasks import forecast_errors

    honest = [~attackers_of(fleet, seed) for seed in range(FLAGS.seeds)]
    return {
        name: float(
            np.mean([metrics.spread(np.asarray(one.mae_units)[of])["mean"] for of in honest])
        )
        for name, one in forecast_errors.naive_errors(fleet).items()
    }


def run_seed(prepared, attack: Attack, seed: int) -> dict[str, Any]:
    """One run: honest clients' error after every round, and means over rounds."""
    import numpy as np

    from fedjax_hk import metrics
    from fedjax_hk.run import prepare as prepare_lib
    from fedjax_hk.store import records

    config = dataclasses.replace(
        prepared.config,
        attack_share=attack.share * FLAGS.attack_share,
        attack_scale=attack.scale * FLAGS.attack_scale,
        seed=seed,
    )
    prepared = prepare_lib.reuse(prepared, config)
    attacker_n = attackers_of(prepared.fleet, seed)
    errors, rounds = [], []
    start = time.process_time()
    for _, info, _ in prepare_lib.rounds(prepared):
        errors.append(metrics.spread(info.errors.mae_units[~attacker_n])["mean"])
        attacker_s = attacker_n[info.cohort_s]
        company = records.seating(info.labels_s, attacker_s)
        weight = attackers_weight(prepared.config, info, attacker_s)
        rounds.append([int(info.num_coalitions), weight, *company])
    names = ("coalitions", "weight", *records.Seating._fields)
    means = np.nanmean(np.array(rounds, float), axis=0)  # rounds without an attacker: no company
    return {
        "errors": errors,
        **dict(zip(names, means.tolist(), strict=True)),
        "cpu_seconds": time.process_time() - start,
    }


def attackers_weight(config: Config, info, attacker_s) -> float:
    """Attackers' part of the model that honest clients of the round are served."""
    import numpy as np

    if config.rule().serve == "global":
        return float(info.weights_s[attacker_s].sum())
    # Members of a coalition weigh the same in it: all rows here are within=uniform.
    honest_s = (info.labels_s >= 0) & ~attacker_s
    same_ss = info.labels_s[honest_s, None] == info.labels_s[None, :]
    return float(np.mean((same_ss & attacker_s).sum(axis=1) / same_ss.sum(axis=1)))


class Figures(NamedTuple):
    """A method under an attack, over seeds; NaN where there is nothing of the kind.

    Attributes:
      errors: `[seeds]` MAE of the honest clients after the last round.
      weight: attackers' part of the model that honest clients are served.
      mixed, together, alone: shares of the attackers that sat with honest clients, with
        attackers only, and alone.
      honest_mixed: share of the honest clients that sat with attackers.
      coalitions: a round.
    """

    errors: list[float]
    weight: float
    mixed: float
    together: float
    alone: float
    honest_mixed: float
    coalitions: float


def figures(name: str, seeds: list[dict[str, Any]]) -> Figures:
    from fedjax_hk.rules import NO_OPINIONS

    def mean(key):
        return sum(seed[key] for seed in seeds) / len(seeds)

    rule, nan = Config(**ROWS[name]).rule(), float("nan")
    last = [seed["errors"][-1] for seed in seeds]
    weight = mean("weight") if rule.average == "mean" else nan  # a median weighs nobody so
    if rule.grouping in NO_OPINIONS:
        return Figures(last, weight, *[nan] * 5)
    mixed, alone = mean("attackers_mixed"), mean("attackers_alone")
    together = max(0.0, 1 - mixed - alone)  # below 0 by rounding
    seated = mixed, together, alone, mean("honest_mixed")
    return Figures(last, weight, *seated, mean("coalitions"))


def print_table(found: dict[str, dict[str, Figures]], naive: dict[str, float]) -> None:
    """Markdown: a row for each method and attack, then what the methods' names stand for."""
    import numpy as np

    header = [
        "method", "attack", "honest clients' MAE, L", "attackers' weight", "attackers with honest",
        "with attackers only", "alone", "honest with attackers", "coalitions a round",
    ]  # fmt: skip
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for name, by_attack in found.items():
        for attack, of in by_attack.items():
            shares = (of.mixed, of.together, of.alone, of.honest_mixed)
            cells = [
                f"`{name}`",
                attack,
                f"{np.mean(of.errors):.1f} ± {np.std(of.errors):.1f}",
                f"{of.weight:.2f}",
                *(f"{100 * share:.0f} %" for share in shares),
                f"{of.coalitions:.1f}",
            ]
            print("| " + " | ".join("" if "nan" in cell else cell for cell in cells) + " |")
    for name, mae in naive.items():
        print(f"| naive: {name} | | {mae:.1f} |" + " |" * (len(header) - 3))
    print()
    for name in found:
        given = " ".join(f"--{flag}={value}" for flag, value in ROWS[name].items())
        print(f"- `{name}`: `{given}`")


if __name__ == "__main__":
    app.run(main)
