"""Loops in float64 that say what models, training, weighting and rounds must return.

Written from the papers, independent of the package; NumPy only.
"""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_layer(kernel, recurrent, bias, inputs):
    """Hidden states `[L, U]` of one sequence `[L, F]`; gates input, forget, cell, output."""
    units = recurrent.shape[1]
    h, c, states = np.zeros(units), np.zeros(units), []
    for x in inputs:
        z = kernel @ x + recurrent @ h + bias
        i, f, g, o = (z[k * units : (k + 1) * units] for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.array(states)


def forecaster(layers, inputs, output):
    """Forecasts `[B]` of the LSTM forecaster without dropout."""
    forecasts = []
    for sequence in np.asarray(inputs, np.float64):
        for name in sorted(name for name in layers if name.startswith("lstm")):
            layer = {k: np.asarray(v, np.float64) for k, v in layers[name].items()}
            sequence = lstm_layer(
                layer["kernel"], layer["recurrent_kernel"], layer["bias"], sequence
            )
        dense, last = (
            {k: np.asarray(v, np.float64) for k, v in layers[n].items()}
            for n in ("dense", "output")
        )
        hidden = np.maximum(dense["kernel"] @ sequence[-1] + dense["bias"], 0)
        value = float((last["kernel"] @ hidden + last["bias"])[0])
        squash = {
            "relu": lambda v: max(v, 0.0),
            "softplus": lambda v: np.log1p(np.exp(v)),
            "linear": lambda v: v,
        }[output]
        forecasts.append(squash(value))
    return np.array(forecasts)


def penalty(loss, error, quantile):
    """Loss of one error (target minus forecast) and its slope in the error."""
    if loss == "mse":
        return error**2, 2 * error
    if loss == "mae":
        return abs(error), np.sign(error)
    if loss == "huber":
        small = abs(error) <= 0.1
        return (error**2 / 2 if small else 0.1 * (abs(error) - 0.05)), np.clip(error, -0.1, 0.1)
    return (quantile * error, quantile) if error >= 0 else ((quantile - 1) * error, quantile - 1)


def line_loss(params, batch, loss="mse", quantile=0.5):
    """Loss and gradient of `offset + slope * x` on a list of (x, y); params (offset, slope)."""
    total, grad = 0.0, np.zeros(2)
    for x, y in batch:
        value, slope = penalty(loss, y - params[0] - params[1] * x, quantile)
        total += value
        grad += slope * np.array([-1.0, -x])
    return total / len(batch), grad / len(batch)


def line_hessian(batch):
    """Of the mean squared error: it does not depend on the parameters."""
    return 2 * np.mean([[[1.0, x], [x, x * x]] for x, _ in batch], axis=0)


def adam_steps(params, epochs, step_size, direction, batches_per_step=1):
    """Adam (Keras epsilon) over epochs of batches.

    Args:
      epochs: for each epoch its list of batches.
      direction: `(params, batches) -> (loss, gradient)`.

    Returns:
      params, mean loss of the steps, number of steps.
    """
    params = np.array(params, np.float64)
    m, v, count, total = np.zeros_like(params), np.zeros_like(params), 0, 0.0
    for batches in epochs:
        for first in range(0, len(batches), batches_per_step):
            used = [batches[(first + k) % len(batches)] for k in range(batches_per_step)]
            loss, grad = direction(params, used)
            total, count = total + loss, count + 1
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
            m_hat, v_hat = m / (1 - 0.9**count), v / (1 - 0.999**count)
            params = params - step_size * m_hat / (np.sqrt(v_hat) + 1e-7)
    return params, total / max(count, 1), count


def client_weights(labels, samples, within, between, min_coalition=1):
    """Weights of the clients and of the members within coalitions, from the definition."""
    coalitions = {}
    for i, label in enumerate(labels):
        if label >= 0:
            coalitions.setdefault(int(label), []).append(i)
    members = np.zeros(len(labels))
    for group in coalitions.values():
        held = sum(float(samples[i]) for i in group)
        for i in group:
            if within == "uniform":
                members[i] = 1 / len(group)
            else:
                members[i] = float(samples[i]) / held if held else 0.0
    counted = [g for g in coalitions.values() if len(g) >= min_coalition]
    counted = counted or list(coalitions.values())
    weights = np.zeros(len(labels))
    for group in counted:
        own = {
            "equal": 1.0,
            "size": float(len(group)),
            "samples": sum(float(samples[i]) for i in group),
        }[between]
        for i in group:
            weights[i] = own * members[i]
    return weights / (weights.sum() or 1.0), members


def pair_values(apart, mask):
    """Dissimilarities of the pairs that take part."""
    num = len(mask)
    return np.array(
        [apart[i][j] for i in range(num) for j in range(i + 1, num) if mask[i] and mask[j]]
    )


def one_minus_cos(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    unit_a, unit_b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return 0.5 * float(np.sum((unit_a - unit_b) ** 2))


def fixed_k_pass(opinions, centers, kind):
    """Labels (nearest center) and the next centers' rows (medoids), without empty ones."""

    def apart(a, b):
        return float(np.linalg.norm(a - b)) if kind == "ball" else one_minus_cos(a, b)

    nearest = [int(np.argmin([apart(x, c) for c in centers])) for x in opinions]
    medoids = []
    for k in range(len(centers)):
        group = [i for i, near in enumerate(nearest) if near == k]
        mean = np.mean(opinions[group], axis=0) if group else None
        medoids.append(min(group, key=lambda i: apart(opinions[i], mean)) if group else None)
    return nearest, medoids


def multi_krum(models, labels, trim):
    """1 for the members of each coalition whose nearest are nearest (Blanchard et al. 2017)."""
    kept = np.zeros(len(labels))
    for label in set(labels) - {-1}:
        group = [i for i, own in enumerate(labels) if own == label]
        bad = int(trim * len(group) + 1e-9)
        scores = []
        for i in group:
            apart = sorted(float(((models[i] - models[j]) ** 2).sum()) for j in group if j != i)
            scores.append(sum(apart[: max(len(group) - bad - 2, 1)]))
        ranked = [group[k] for k in np.argsort(scores, kind="stable")]
        kept[ranked[: len(group) - bad]] = 1
    return kept
