"""Errors of every client, their spread over the fleet, and agreement of groupings."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_hk.types import Array, Fleet, Samples

# Rounding of `scaled * scale + shift` in float32, in shares of its two terms. A reading
# below it is zero: else a home that uses nothing would have a total of 1e-6 liters.
_ROUNDING = 4 * float(np.finfo(np.float32).eps)


class ClientErrors(NamedTuple):
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

    mse: Array
    mae: Array
    mae_units: Array
    rmse_units: Array
    wape: Array
    accuracy: Array
    num_windows: Array


def client_errors(forecast_nw: Array, samples: Samples) -> ClientErrors:
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


def naive_errors(fleet: Fleet) -> dict[str, ClientErrors]:
    """Errors of the naive forecasts, name to NumPy float64 errors, scaled as the model's.

    Each forecast is scored on the test windows where it can be made; `num_windows` says
    how many these were.
    """
    test = Samples(None, *(np.asarray(x, np.float64) for x in fleet.test[1:]))
    errors = {}
    for name, units_nw in fleet.naive.items():
        mask_nw = (test.mask > 0) & np.isfinite(units_nw)
        scaled_nw = (units_nw - test.shift) / test.scale
        errors[name] = _errors(np, scaled_nw, test.targets, mask_nw, test.scale, test.shift)
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


class ClassErrors(NamedTuple):
    """How well each client's own samples are told apart; NaN for a client without samples.

    Attributes:
      loss: `[N]` mean cross-entropy, in nats.
      accuracy: `[N]` share of the samples whose class has the largest output.
      balanced_accuracy: `[N]` that share in each class of which the client has samples,
        averaged over these classes.
      num_samples: `[N]` int32 samples that were judged.
    """

    loss: Array
    accuracy: Array
    balanced_accuracy: Array
    num_samples: Array


def class_errors(logits_nwc: Array, samples: Samples) -> ClassErrors:
    """How well each client's samples are told apart; usable inside jit.

    Args:
      logits_nwc: `[N, W, C]`; anything, NaN included, where masked.
      samples: with classes `[N, W]` for targets; inputs are not read.

    Returns:
      Errors, each `[N]`; NaN where an output for a real sample is not finite.

    Raises:
      ValueError: the shapes do not fit.
    """
    targets_nw, mask_nw = samples.targets, samples.mask
    if logits_nwc.shape[:-1] != targets_nw.shape:
        raise ValueError(
            f"Expected logits of shape [N, W, C] for {targets_nw.shape} samples, "
            f"got {logits_nwc.shape}."
        )
    logits_nwc = jnp.where(mask_nw[..., None], logits_nwc, 0)
    finite_n = jnp.all(jnp.isfinite(logits_nwc), axis=(1, 2))
    log_share_nwc = jax.nn.log_softmax(logits_nwc, axis=-1)
    log_share_nw = jnp.take_along_axis(log_share_nwc, targets_nw[..., None], axis=-1)[..., 0]
    right_nw = mask_nw & (jnp.argmax(logits_nwc, axis=-1) == targets_nw)
    num_nc, right_nc = (
        jax.vmap(lambda targets_w, counts_w: _count(targets_w, counts_w, logits_nwc.shape[-1]))(
            targets_nw, counted_nw
        )
        for counted_nw in (mask_nw, right_nw)
    )
    num_n = jnp.sum(mask_nw, axis=1)

    def mean(total_n, by_n):
        known_n = finite_n & (by_n > 0)
        return jnp.where(known_n, total_n / jnp.maximum(by_n, 1), jnp.nan)

    recall_nc = right_nc / jnp.maximum(num_nc, 1)
    return ClassErrors(
        loss=mean(-jnp.sum(jnp.where(mask_nw, log_share_nw, 0), axis=1), num_n),
        accuracy=mean(jnp.sum(right_nw, axis=1), num_n),
        balanced_accuracy=mean(jnp.sum(recall_nc, axis=1), jnp.sum(num_nc > 0, axis=1)),
        num_samples=num_n.astype(jnp.int32),
    )


def _count(targets_w: Array, counted_w: Array, num_classes: int) -> Array:
    """`[C]` samples of each class among those that count."""
    return jnp.zeros(num_classes, jnp.int32).at[targets_w].add(counted_w.astype(jnp.int32))


def naive_class_errors(fleet: Fleet) -> dict[str, ClassErrors]:
    """`class_errors` of guesses that need no model (no loss: they have no probabilities)."""
    test, errors = fleet.test, {}
    targets_nw, mask_nw = np.asarray(test.targets), np.asarray(test.mask)
    for name, guess_nw in fleet.naive.items():
        known_nw = mask_nw & np.isfinite(guess_nw)
        guessed_nw = np.where(known_nw, guess_nw, 0).astype(np.int32)
        logits_nwc = guessed_nw[..., None] == np.arange(len(fleet.classes))
        found = class_errors(
            jnp.asarray(logits_nwc, jnp.float32), Samples(None, targets_nw, known_nw)
        )
        found = ClassErrors(*map(np.asarray, found))
        errors[name] = found._replace(loss=np.full_like(found.loss, np.nan))
    return errors


def constant_clients(outputs_nwc: Array, mask_nw: Array) -> Array:
    """Whether all of a client's samples, two or more, get one output, `[N]` bool; for jit.

    That is a dead network: no ReLU of its last hidden layer answers to any sample.
    """
    first_n = jnp.argmax(mask_nw, axis=1)
    first_n1c = jnp.take_along_axis(outputs_nwc, first_n[:, None, None], axis=1)
    same_nw = jnp.all(outputs_nwc == first_n1c, axis=-1)
    return jnp.all(same_nw | ~mask_nw, axis=1) & (jnp.sum(mask_nw, axis=1) > 1)


def spread(values_n: Array, *, higher_is_better: bool = False) -> dict[str, float]:
    """How a figure is spread over the clients.

    Args:
      values_n: `[N]`; clients whose value is not finite are left out and counted.
      higher_is_better: True for accuracy, where the worst clients have the lowest.

    Returns:
      mean, std (over clients, divided by their number), q10, q25, median, q75, q90,
      worst_tenth (mean of the worst tenth of the clients, at least one), num_clients
      and num_left_out; NaN for all but the counts if nobody is left.
    """
    values_n = np.asarray(values_n, np.float64)
    kept = np.sort(values_n[np.isfinite(values_n)])
    counts = {"num_clients": len(kept), "num_left_out": len(values_n) - len(kept)}
    if not len(kept):
        names = ("mean", "std", "q10", "q25", "median", "q75", "q90", "worst_tenth")
        return dict.fromkeys(names, float("nan")) | counts
    num_worst = -(-len(kept) // 10)
    worst = kept[:num_worst] if higher_is_better else kept[-num_worst:]
    q10, q25, median, q75, q90 = (float(q) for q in np.quantile(kept, (0.1, 0.25, 0.5, 0.75, 0.9)))
    return {
        "mean": float(kept.mean()),
        "std": float(kept.std()),
        "q10": q10,
        "q25": q25,
        "median": median,
        "q75": q75,
        "q90": q90,
        "worst_tenth": float(worst.mean()),
    } | counts


class Interval(NamedTuple):
    """Attributes:
    mean: of the values that are finite.
    low, high: 95 % interval of the mean; NaN for fewer than two values.
    num: values that are finite.
    """

    mean: float
    low: float
    high: float
    num: int


def bootstrap_interval(values_n: Array, *, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Interval of a mean over clients: percentile bootstrap, clients drawn with replacement.

    For a comparison, give the differences client by client (paired).

    Args:
      values_n: `[N]`; what is not finite is left out.
      seed: the same seed gives the same interval.

    Source: Efron and Tibshirani (1993), chapter 13.
    """
    values_n = np.asarray(values_n, np.float64)
    values_n = values_n[np.isfinite(values_n)]
    num = len(values_n)
    if num < 2:
        nan = float("nan")
        return Interval(float(values_n[0]) if num else nan, nan, nan, num)
    rng = np.random.default_rng(seed)
    block = max(1, 2_000_000 // num)  # the draws of all resamples would be 80 MB at N = 1,000
    means = [
        values_n[rng.integers(num, size=(min(block, resamples - done), num))].mean(axis=1)
        for done in range(0, resamples, block)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(values_n.mean()), float(low), float(high), num)


def usage(fleet: Fleet) -> tuple[np.ndarray, np.ndarray]:
    """What each client uses: mean reading in units and share of readings that are zero, `[N]`.

    Of the readings that are forecast in training and test.
    """
    readings, masks, sizes = [], [], []
    for samples in (fleet.train, fleet.test):
        scaled_nw = np.asarray(samples.targets, np.float64) * samples.scale
        readings.append(scaled_nw + samples.shift)
        sizes.append(abs(scaled_nw) + abs(samples.shift))
        masks.append(samples.mask)
    reading_nw, size_nw, mask_nw = (np.concatenate(x, axis=1) for x in (readings, sizes, masks))
    num_n = np.maximum(mask_nw.sum(axis=1), 1)
    zero_nw = mask_nw & (abs(reading_nw) <= _ROUNDING * size_nw)
    return np.where(mask_nw, reading_nw, 0).sum(axis=1) / num_n, zero_nw.sum(axis=1) / num_n


def adjusted_rand_index(labels_a: Array, labels_b: Array) -> float:
    """Agreement of two groupings of the same clients: 1 if equal, about 0 if by chance.

    NaN without any client. Source: Hubert and Arabie (1985), in the pair counts of
    Steinley (2004), as scikit-learn has it.
    """
    labels_a, labels_b = np.asarray(labels_a), np.asarray(labels_b)
    if labels_a.shape != labels_b.shape or labels_a.ndim != 1:
        raise ValueError(f"Expected two [S] labels, got {labels_a.shape} and {labels_b.shape}.")
    num = len(labels_a)
    if num == 0:
        return float("nan")
    _, a = np.unique(labels_a, return_inverse=True)
    _, b = np.unique(labels_b, return_inverse=True)
    both = np.bincount(a * (int(b.max()) + 1) + b)

    def ordered_pairs(sizes):  # Python integers: no overflow
        return int((sizes.astype(np.int64) ** 2).sum()) - num

    together, in_a, in_b = (ordered_pairs(s) for s in (both, np.bincount(a), np.bincount(b)))
    only_a, only_b = in_a - together, in_b - together
    if only_a == 0 and only_b == 0:
        return 1.0
    apart = num * num - num - together - only_a - only_b
    above = 2.0 * (together * apart - only_a * only_b)
    below = (together + only_a) * (only_a + apart) + (together + only_b) * (only_b + apart)
    return above / below


def agreement(labels_s: Array, planted_s: Array) -> float:
    """Agreement of coalitions with the planted groups: their adjusted Rand index.

    Args:
      labels_s: `[S]` coalition of each client; -1, a masked client, is left out.
      planted_s: `[S]` planted group; -1, a planted outlier, is a group of its own each,
        so that a rule is rewarded for leaving it alone.

    Returns:
      The index, NaN if every client is masked.
    """
    labels_s, planted_s = np.asarray(labels_s), np.asarray(planted_s)
    if labels_s.shape != planted_s.shape:
        raise ValueError(f"Expected two [S] labels, got {labels_s.shape} and {planted_s.shape}.")
    own_s = planted_s.max(initial=0) + 1 + np.arange(len(planted_s))
    truth_s = np.where(planted_s < 0, own_s, planted_s)
    taking_part_s = labels_s >= 0
    return adjusted_rand_index(labels_s[taking_part_s], truth_s[taking_part_s])
