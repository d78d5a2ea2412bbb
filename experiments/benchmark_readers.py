"""How long 16.8 million raw readings take to load, and how much memory.

    python experiments/benchmark_readers.py --json=readers.json

Makes a file of 1,099 households from the 78 of the Alicante set, each with a new key, the
first readings of a household and its register multiplied by a factor of its own (or else
the copies would be found to be the same meters); loads it twice, each time in a new
process, with a cache folder that is empty at first.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from absl import app, flags

_RAW = flags.DEFINE_string(
    "raw",
    "../shared/data/alicante_swm/raw/swm_trialA_1K_subset78.csv.xz",
    "The file to make it from.",
)
_HOUSEHOLDS = flags.DEFINE_integer("households", 1099, "Households of the file.")
_ROWS = flags.DEFINE_integer("rows", 15290, "Readings a household at most.")
_JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")

# In a process of its own: seconds, the peak of resident memory, and what was read.
_LOAD = """
import json, resource, sys, time
start = time.perf_counter()
from fedjax_hk import data
imported, cpu = time.perf_counter(), time.process_time()
table = data.read(sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({
    "import_s": imported - start, "load_s": time.perf_counter() - imported, "peak_mib": peak,
    "cpu_s": time.process_time() - cpu,
    "clients": len(table.client_ids), "days": len(table.times),
    "excluded": len(table.excluded)}))
"""


def make_file(raw: Path, path: Path, households: int, most: int) -> int:
    """Writes the file; the number of rows."""
    own: dict[str, list[tuple[str, int]]] = {}
    with lzma.open(raw, "rt") as file:
        header = next(file)
        for line in file:
            key, time, register, _ = line.split(";")
            rows = own.setdefault(key, [])
            if len(rows) < most:
                rows.append((time, int(float(register))))
    originals, total = list(own.values()), 0
    with path.open("w") as file:
        file.write(header)
        for i in range(households):
            copy, which = divmod(i, len(originals))
            key = uuid.uuid5(uuid.NAMESPACE_OID, str(i))
            rows = originals[which]
            file.writelines(
                f"{key};{time};{register * (10 + copy) // 10};0\n" for time, register in rows
            )
            total += len(rows)
    return total


def load(path: Path, cache: Path) -> dict:
    """The figures of a start."""
    child = subprocess.run(
        [sys.executable, "-c", _LOAD, str(path)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(child.stdout)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Expected flags only, got {argv[1:]}.")
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder) / "meters.csv", Path(folder) / "cache"
        rows = make_file(Path(_RAW.value), path, _HOUSEHOLDS.value, _ROWS.value)
        figures = {"rows": rows, "bytes": path.stat().st_size}
        print(f"{rows} readings, {figures['bytes'] / 1e6:.0f} MB, load average at first "
              f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)  # fmt: skip
        for name in ("first", "second"):
            figures[name] = found = load(path, cache)
            print(
                f"{name:>6} start: {found['load_s']:6.1f} s ({found['cpu_s']:.1f} s of CPU), and "
                f"{found['import_s']:.1f} s to import; peak {found['peak_mib']:.0f} MiB; "
                f"{found['clients']} clients, {found['days']} days, {found['excluded']} left out",
                flush=True,
            )
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    app.run(main)
