"""Speed of the paper's round: 50 of 184 clients, 5 epochs, evaluation of the fleet.

    python experiments/benchmark.py --json=benchmark.json

Prints start-up, compile time, seconds a round, the share of the coalition step, and peak
memory. Every round is timed to its end; the first one is a warm-up and left out.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

START = time.perf_counter()

from absl import app, flags  # noqa: E402  START comes first: imports are part of starting

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 10, "rounds to time")
flags.DEFINE_integer("devices", 0, "devices; 0: all accelerators, or all CPU cores")
flags.DEFINE_integer("chunk", 0, "clients a device trains at once; 0 chooses")
flags.DEFINE_string("agg", "hk_cosine", "rule")
flags.DEFINE_float("dropout", 0.2, "dropout after each LSTM layer")
flags.DEFINE_string("json", "", "file for the figures")


def main(argv):
    del argv
    import jax

    from fedjax_hk import data
    from fedjax_hk.run import devices
    from fedjax_hk.run import prepare as prepare_lib
    from fedjax_hk.settings.config import Config

    devices.split_cpu(FLAGS.devices)

    fleet = data.build_fleet(data.synthetic_fleet())
    config = Config(agg=FLAGS.agg, devices=FLAGS.devices, chunk=FLAGS.chunk, dropout=FLAGS.dropout)
    prepared = prepare_lib.prepare(config, fleet)
    state, seconds, first = prepared.state, [], None
    for round_number in range(1, FLAGS.rounds + 2):
        start = time.perf_counter()
        state, _, _ = jax.block_until_ready(prepare_lib.step(prepared, state, round_number))
        seconds.append(time.perf_counter() - start)
        first = first or time.perf_counter() - START
    share = coalition_seconds(prepared, state)
    device = jax.devices()[0]
    figures = {
        "device": f"{prepared.engine.mesh.size} x {device.device_kind}",
        "jax": jax.__version__,
        "parameters": int(state.params.size),
        "start_to_end_of_first_round_s": first,
        "compile_s": prepared.compile_seconds,
        "round_s_median": statistics.median(seconds[1:]),
        "round_s_min": min(seconds[1:]),
        "round_s_max": max(seconds[1:]),
        "coalition_step_s": share,
        "coalition_share": share / statistics.median(seconds[1:]),
        "peak_memory_gib": peak_memory_gib(device),
    }
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    if FLAGS.json:
        with open(FLAGS.json, "w") as file:
            json.dump(figures, file, indent=1)


def coalition_seconds(prepared, state, repeats: int = 50) -> float:
    """Median seconds of inner products, interaction, barycenters and average, on their own."""
    import jax

    from fedjax_hk import hk

    size = prepared.config.clients_per_round or 50
    key = jax.random.key(1)
    noise = 0.01 * jax.random.normal(key, (size, state.params.size))
    models_sd = state.params[None, :] + noise

    @jax.jit
    def coalition_step(models_sd):
        found = hk.interact(models_sd, hk.cosine(0.9))
        centers_sd = hk.barycenters(models_sd, found.labels_s)
        return centers_sd, hk.average(models_sd, found.weights_s)

    jax.block_until_ready(coalition_step(models_sd))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(coalition_step(models_sd))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def peak_memory_gib(device) -> float:
    """Of the accelerator where there is one, else of this process."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    unit = 2**10 if sys.platform.startswith("linux") else 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


if __name__ == "__main__":
    app.run(main)
