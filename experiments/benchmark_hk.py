"""What the Hegselmann-Krause operator costs, beside NumPy.

    python experiments/benchmark_hk.py --json=hk.json

For each size: seconds to compile, seconds for coalitions and the averaged model (the best
of interleaved repeats), NumPy's `X @ X.T` plus `w @ X`, and the extra memory of a run,
measured in a process of its own as the peak beyond that with the opinions in place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
from absl import app, flags

_JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Interleaved repeats; the best counts.")
_SIZES = flags.DEFINE_list(
    "sizes", ["50x7633", "1000x7633", "50x4000000"], "Clients x parameters, a list."
)
_MEMORY_OF = flags.DEFINE_string("memory_of", None, "Internal: measure one size and print MiB.")


def opinions_of(num_clients: int, dim: int) -> np.ndarray:
    """`[S, D]` float32, nearly parallel, filled row by row to keep the peak low."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(dim, np.float32)
    opinions = np.empty((num_clients, dim), np.float32)
    for row in opinions:
        rng.standard_normal(out=row, dtype=np.float32)
        row *= np.float32(1e-3 * np.exp(rng.normal(0, 0.5)))
        row += base
    return opinions


def operator():
    """The jitted `(opinions) -> (result, model)`; imported late, `--help` needs no jax."""
    import jax

    from fedjax_hk import hk

    @jax.jit
    def run(opinions):
        result = hk.interact(opinions, hk.cosine(1 - 1e-6))
        return result, hk.average(opinions, result.weights_s)

    return jax, run


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def memory_mib(field: str) -> float:
    """Of this process, Linux: `VmRSS` (now) or `VmHWM` (peak since the last reset)."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def measure_memory(num_clients: int, dim: int) -> dict[str, float]:
    """Extra MiB of a run, after a small one that loads the compiler."""
    jax, run = operator()
    jax.block_until_ready(run(opinions_of(num_clients, 1024)))
    host = opinions_of(num_clients, dim)
    opinions = jax.numpy.asarray(host)  # may or may not copy, so before the baseline
    jax.block_until_ready(opinions)
    compiled = run.lower(opinions).compile()
    reset_peak()
    before = memory_mib("VmRSS")
    jax.block_until_ready(compiled(opinions))
    return {"extra_mib": memory_mib("VmHWM") - before, "opinions_mib": host.nbytes / 2**20}


def measure(size: str, repeats: int) -> dict[str, float]:
    num_clients, dim = (int(part) for part in size.split("x"))
    jax, run = operator()
    host = opinions_of(num_clients, dim)
    opinions = jax.numpy.asarray(host)
    weights = np.full(num_clients, 1 / num_clients, np.float32)

    start = time.perf_counter()
    compiled = run.lower(opinions).compile()
    compile_s = time.perf_counter() - start
    result, _ = jax.block_until_ready(compiled(opinions))

    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(seconds(lambda: jax.block_until_ready(compiled(opinions))))
        theirs.append(seconds(lambda: (host @ host.T, weights @ host)))
    child = subprocess.run(
        [sys.executable, __file__, f"--memory_of={size}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "clients": num_clients,
        "parameters": dim,
        "steps": int(result.num_steps),
        "coalitions": int(result.num_coalitions),
        "compile_s": compile_s,
        "run_s": min(ours),
        "numpy_s": min(theirs),
        **json.loads(child.stdout.splitlines()[-1]),
    }


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Expected flags only, got {argv[1:]}.")
    if _MEMORY_OF.value:
        num_clients, dim = (int(part) for part in _MEMORY_OF.value.split("x"))
        print(json.dumps(measure_memory(num_clients, dim)))
        return
    rows = []
    print(
        f"{'S x D':>14} {'steps':>5} {'K':>4} {'compile s':>9} {'run ms':>9} {'NumPy ms':>9} "
        f"{'ratio':>6} {'extra MiB':>9} {'of opinions':>11}"
    )
    for size in _SIZES.value:
        row = measure(size, _REPEATS.value)
        rows.append(row)
        print(
            f"{size:>14} {row['steps']:>5} {row['coalitions']:>4} {row['compile_s']:>9.2f} "
            f"{1e3 * row['run_s']:>9.2f} {1e3 * row['numpy_s']:>9.2f} "
            f"{row['run_s'] / row['numpy_s']:>6.2f} {row['extra_mib']:>9.1f} "
            f"{row['extra_mib'] / row['opinions_mib']:>11.2f}",
            flush=True,
        )
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    app.run(main)
