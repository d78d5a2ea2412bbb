"""Errors of forecasts, one a client: scaled, in units, and of forecasts without a model."""

from __future__ import annotations

from typing import Generic, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_hk.types import A, Array, Fleet, Samples

# Rounding of `scaled * scale + shift` in float32, in shares of its two terms. A reading
# below it is zero: else a home that uses nothing would have a total of 1e-6 liters.
_ROUNDING = 4 * float(np.finfo(np.float32).eps)


class ClientErrors(NamedTuple, Generic[A]):
    """Errors of each client over its own windows; NaN for a client without windows.

    Attributes:
      mse: `[N]` mean squared error, scaled.
      mae: `[N]` mean absolute error, scaled.
      mae_units: `[N]` mean absolute error in units.
      rmse_units: `[N]` root mean squared error in units.
      wape: `[N]` sum of absolute errors over the sum of absolute readings; NaN where
        the readings are all zero.
      accuracy: `[N]` max(0, 1 - wape), NaN with it.
      num_windows: `[N]` int32 windows that were scored.
    """

    mse: A
    mae: A
    mae_units: A
    rmse_units: A
    wape: A
    accuracy: A
    num_windows: A


def client_errors(forecast_nw: Array, samples: Samples) -> ClientErrors[Array]:
    """Errors of each client; usable inside jit.

    Args:
      forecast_nw: `[N, W]` scaled forecasts; anything, NaN included, where masked.
      samples: the windows that were forecast; inputs are not read.

    Returns:
      Errors, each `[N]`; a non-finite forecast of a real window makes them non-finite.

    Raises:
      ValueError: the shapes differ.

    Source: eq. (19) of the FedHK paper for each client; its accuracy is not defined there,
    this one is 1 - WAPE because a home may read zero.
    """
    return _errors(jnp, forecast_nw, *samples[1:])


def naive_errors(fleet: Fleet) -> dict[str, ClientErrors[np.ndarray]]:
    """Errors of the naive forecasts, name to NumPy float64 errors, scaled as the model's.

    Each forecast is scored on the test windows where it can be made; `num_windows` says
    how many these were.
    """
    targets_nw, read_nw, scale_nw, shift_nw = (np.asarray(x, np.float64) for x in fleet.test[1:])
    errors = {}
    for name, units_nw in fleet.naive.items():
        mask_nw = (read_nw > 0) & np.isfinite(units_nw)
        scaled_nw = (units_nw - shift_nw) / scale_nw
        errors[name] = _errors(np, scaled_nw, targets_nw, mask_nw, scale_nw, shift_nw)
    return errors


def _errors(xp, forecast_nw, targets_nw, mask_nw, scale_nw, shift_nw) -> ClientErrors:
    """`client_errors` in NumPy or JAX."""
    if forecast_nw.shape != targets_nw.shape:
        raise ValueError(
            f"Expected forecasts of shape [N, W] = {targets_nw.shape}, got {forecast_nw.shape}."
        )
    error_nw = xp.where(mask_nw, forecast_nw - targets_nw, 0.0)
    error_units_nw = error_nw * scale_nw
    size_nw = abs(targets_nw * scale_nw) + abs(shift_nw)
    reading_nw = abs(targets_nw * scale_nw + shift_nw)
    counts_nw = mask_nw & (reading_nw > _ROUNDING * size_nw)
    num_n = mask_nw.sum(axis=1)
    total_n = xp.where(counts_nw, reading_nw, 0.0).sum(axis=1)
    absolute_n = abs(error_units_nw).sum(axis=1)

    def ratio(sum_n, by_n):
        return xp.where(by_n > 0, sum_n / xp.where(by_n > 0, by_n, 1), xp.nan)

    wape_n = ratio(absolute_n, total_n)
    return ClientErrors(
        mse=ratio((error_nw**2).sum(axis=1), num_n),
        mae=ratio(abs(error_nw).sum(axis=1), num_n),
        mae_units=ratio(absolute_n, num_n),
        rmse_units=xp.sqrt(ratio((error_units_nw**2).sum(axis=1), num_n)),
        wape=wape_n,
        accuracy=xp.maximum(1.0 - wape_n, 0.0),
        num_windows=num_n.astype(xp.int32),
    )


def dead_clients(forecast_nw: Array, mask_nw: Array) -> Array:
    """Whether all of a client's forecasts are exactly zero, `[N]` bool; usable inside jit.

    That is a dead ReLU output: its gradient is zero too and training cannot revive it.
    A client without windows is not called dead.
    """
    silent_n = jnp.where(mask_nw, forecast_nw == 0.0, True).all(axis=1)
    return silent_n & mask_nw.any(axis=1)


def usage(fleet: Fleet) -> tuple[np.ndarray, np.ndarray]:
    """What each client uses: mean reading in units and share of readings that are zero, `[N]`.

    Of the readings that are forecast in training and test.
    """
    readings, masks, sizes = [], [], []
    for samples in (fleet.train, fleet.test):
        shift_nw = np.asarray(samples.shift)
        scaled_nw = np.asarray(samples.targets, np.float64) * samples.scale
        readings.append(scaled_nw + shift_nw)
        sizes.append(abs(scaled_nw) + abs(shift_nw))
        masks.append(samples.mask)
    reading_nw, size_nw, mask_nw = (np.concatenate(x, axis=1) for x in (readings, sizes, masks))
    num_n = np.maximum(mask_nw.sum(axis=1), 1)
    zero_nw = mask_nw & (abs(reading_nw) <= _ROUNDING * size_nw)
    return np.where(mask_nw, reading_nw, 0).sum(axis=1) / num_n, zero_nw.sum(axis=1) / num_n
