"""The Hegselmann-Krause interaction as plain float64 loops, to compare with.

Written from the FedHK paper and independent of `fedjax_hk.hk`: it moves the opinions
themselves, takes differences of vectors, and knows nothing of Gram matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SLACK = 1e-6


class Reference(NamedTuple):
    labels: np.ndarray
    num_coalitions: int
    num_steps: int
    converged: bool
    positions: np.ndarray
    neighbors: list  # of each pass, [S, S] bool


def unit(vector):
    norm = np.sqrt(np.sum(vector * vector))
    return vector / norm if norm > 0 else vector


def one_minus_cos(a, b):
    """From the difference of unit vectors; a zero vector has cosine 0 with any other."""
    if not a.any() or not b.any():
        return 1.0
    difference = unit(a) - unit(b)
    return 0.5 * float(np.sum(difference * difference))


def squared_distance(a, b):
    return float(np.sum((a - b) * (a - b)))


def dissimilarities(opinions, kind):
    z = np.asarray(opinions, np.float64)
    out = np.zeros((len(z), len(z)))
    pair = squared_distance if kind == "ball" else one_minus_cos
    for i in range(len(z)):
        for j in range(i):
            out[i, j] = out[j, i] = pair(z[i], z[j])
    return out


def fast_dissimilarities(opinions, kind, rows):
    """`[R, S]` of some clients with all, one row of differences at a time."""
    z = np.asarray(opinions, np.float64)
    if kind == "cosine":
        z = z / np.linalg.norm(z, axis=1, keepdims=True)
    out = np.empty((len(rows), len(z)))
    for i, row in enumerate(rows):
        difference = z - z[row]
        out[i] = np.einsum("sd,sd->s", difference, difference)
    return out if kind == "ball" else out / 2


def neighbors(x, kind, limit, floor=0.0):
    """`[S, S]` bool; `limit` and `floor` are distances (ball) or 1 - cos (cosine)."""
    if kind == "ball":
        limit, floor = limit**2, floor**2
    inside = (x <= limit * (1 + SLACK)) & (x >= floor * (1 - SLACK))
    return inside | np.eye(len(x), dtype=bool)


def components(links):
    labels = -np.ones(len(links), int)
    for start in range(len(links)):
        if labels[start] >= 0:
            continue
        stack = [start]
        while stack:
            i = stack.pop()
            if labels[i] < 0:
                labels[i] = start
                stack.extend(j for j in range(len(links)) if links[i, j] and labels[j] < 0)
    return labels


def interact(opinions, kind, limit, floor=0.0, *, state_norm="none", max_steps=50, tol=1e-9):
    """Algorithm 1; at rest when nothing moves by more than `tol` times the largest distance."""
    z = np.asarray(opinions, np.float64).copy()
    if state_norm != "none":
        z = np.stack([unit(row) for row in z])
    scale = np.sqrt(max(squared_distance(a, b) for a in z for b in z))
    history, num_steps = [], 0
    while True:
        x = dissimilarities(z, "ball" if kind == "ball" else "cosine")
        graph = neighbors(x, kind, limit, floor)
        history.append(graph)
        moved = np.zeros_like(z)
        for i in range(len(z)):
            moved[i] = sum(z[j] for j in range(len(z)) if graph[i, j]) / graph[i].sum()
            if state_norm == "every_step":
                moved[i] = unit(moved[i])
        largest = max(np.sqrt(squared_distance(a, b)) for a, b in zip(z, moved, strict=True))
        converged = bool(largest <= tol * scale)
        if converged or num_steps == max_steps:
            break
        z, num_steps = moved, num_steps + 1
    if floor > 0:
        links = x < (floor**2 if kind == "ball" else floor) * (1 - SLACK)
    else:
        links = graph
    labels = components(links)
    return Reference(labels, len(set(labels)), num_steps, converged, z, history)


def client_weights(labels):
    sizes = {k: int(np.sum(labels == k)) for k in set(labels.tolist()) if k >= 0}
    return np.array([1.0 / (len(sizes) * sizes[k]) if k >= 0 else 0.0 for k in labels.tolist()])
