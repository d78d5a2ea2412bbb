"""The devices that a run uses; jax starts when it is first asked for them."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from fedjax_hk.settings.config import Config, ConfigError


def num_cores() -> int:
    """Cores that this process may use; where the system does not tell, as macOS, all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def split_cpu(devices: int = 0) -> None:
    """Splits a CPU into devices, one a core if 0, before jax starts.

    Two devices of one core each are nearly twice as fast as one device of two cores.
    """
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Too late in a process where jax runs already, whose devices are then taken.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices or num_cores())


def make_mesh(config: Config):
    """The devices that clients are spread over.

    Errors: ConfigError if more are asked for than there are.
    """
    import jax
    import numpy as np

    devices = jax.devices()
    if config.devices > len(devices):
        raise ConfigError(
            f"--devices={config.devices}: there are {len(devices)} "
            f"({devices[0].platform}); give at most that, or 0 for all."
        )
    return jax.sharding.Mesh(np.array(devices[: config.devices or None]), ("clients",))


def use(config: Config) -> None:
    """Starts jax on the devices of the settings.

    What is stored of a run is what was asked for: how many devices there are is a property of
    the machine.

    Errors: ConfigError if there are fewer devices than asked for.
    """
    split_cpu(config.devices)
    make_mesh(config)


def describe() -> dict[str, Any]:
    """What config.json says of the devices that there are."""
    import jax

    device = jax.devices()[0]
    return {"platform": device.platform, "kind": device.device_kind, "count": len(jax.devices())}
