"""A user's script. It is not run: that a type checker accepts it shows that what users import
has the types that it says."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np

import fedjax_hk
from fedjax_hk import hk, models


class Recorder:
    def __init__(self) -> None:
        self.errors: list[float] = []

    def on_round_end(self, round_number: int, metrics: dict[str, Any]) -> None:
        self.errors.append(metrics["mae_units"])


class Linear(nn.Module):
    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return nn.Dense(1)(inputs[..., 0])[:, 0]


def run() -> str:
    config = fedjax_hk.Config(agg="hk_cosine", tau=0.9, rounds=3)
    fleet = fedjax_hk.load_fleet(config)
    model = models.from_flax(Linear(), fleet.train.inputs[0, :2])
    prepared = fedjax_hk.prepare(config, fleet, model)
    recorder = Recorder()
    with fedjax_hk.create_folder(name="typed") as folder:
        outcome = fedjax_hk.simulate(prepared, folder, callbacks=[recorder])
    return f"{recorder.errors[-1]:.1f} {fleet.unit}\n{outcome.text}"


def group(opinions: dict[str, jax.Array]) -> list[int]:
    found = hk.interact(opinions, hk.cosine(0.9), max_steps=20)
    return np.asarray(found.labels_s).tolist()


def serve(models_sd: np.ndarray, num_samples_s: list[int]) -> jax.Array:
    server = fedjax_hk.make_server(fedjax_hk.RULES["hk_cosine"], num_clients=len(models_sd))
    state = server.init(jax.numpy.zeros(models_sd.shape[1]), len(models_sd))
    sent = fedjax_hk.upload(models_sd, num_samples_s)
    keys_s = jax.random.split(jax.random.key(0), len(models_sd))
    hparams = jax.tree.map(np.float32, fedjax_hk.HParams())
    state, aggregate = server.step(state, sent, keys_s, hparams)
    return state.params - aggregate.centers_sd[0]
