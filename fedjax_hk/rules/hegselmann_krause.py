"""The Hegselmann-Krause interaction with one of the paper's neighborhoods."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.rules.grouping import Grouping, GroupingInfo, pair_quantiles, stateless
from fedjax_hk.settings import thresholds
from fedjax_hk.types import Array, HParams, Settings

MAX_STEPS = 50  # inner steps; the paper saw at most ten, theory allows many more (spec H1)


def _share_linked(gram_ss: Array, mask_s: Array, level: Array) -> Array:
    """1 - cos below which the share `1 - level` of this round's pairs lies."""
    return pair_quantiles(hk.dissimilarity(gram_ss, "cosine"), mask_s, 1 - level)


def _quantile(hparams: HParams, gram_ss: Array, mask_s: Array) -> hk.Neighborhood:
    limit = _share_linked(gram_ss, mask_s, hparams.tau)
    return hk.Neighborhood("cosine", limit, jnp.float32(0))


def _quantile_band(hparams: HParams, gram_ss: Array, mask_s: Array) -> hk.Neighborhood:
    limit = _share_linked(gram_ss, mask_s, hparams.eps_lower)
    return hk.Neighborhood("cosine", limit, _share_linked(gram_ss, mask_s, hparams.eps_upper))


def _matched(hparams: HParams, gram_ss: Array, mask_s: Array) -> hk.Neighborhood:
    return hk.unit_ball(jnp.sqrt(2 * (1 - jnp.asarray(hparams.tau))))


def _linear(hparams: HParams, gram_ss: Array, mask_s: Array) -> hk.Neighborhood:
    return hk.unit_ball(2 * (1 - jnp.asarray(hparams.tau)))


# Whom a client listens to, by what the threshold means (a key of `thresholds.MEANINGS`).
NEIGHBORHOODS: dict[str, Callable[[HParams, Array, Array], hk.Neighborhood]] = {
    "cosine": lambda hparams, gram_ss, mask_s: hk.cosine(hparams.tau),  # eq. (13)
    "band": lambda hparams, gram_ss, mask_s: hk.band(hparams.eps_lower, hparams.eps_upper),  # (14)
    "distance": lambda hparams, gram_ss, mask_s: hk.ball(hparams.epsilon),  # eq. (12)
    "radius": lambda hparams, gram_ss, mask_s: hk.unit_ball(hparams.tau),  # spec A3
    "matched": _matched,
    "linear": _linear,
    "quantile": _quantile,
    "quantile band": _quantile_band,
}


def _interaction(threshold: str, settings: Settings) -> Grouping:
    meaning = thresholds.of_settings(threshold, settings)
    neighborhood = NEIGHBORHOODS[meaning.name]

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        near = neighborhood(hparams, gram_ss, mask_s)
        result = hk.interact_from_gram(
            gram_ss, near, mask=mask_s, max_steps=MAX_STEPS, state_norm=settings.state_norm
        )
        info = GroupingInfo(
            result.labels_s,
            result.num_steps,
            result.converged,
            result.margin,
            result.residual,
            jnp.asarray(near.limit, jnp.float32),
        )
        return info, state

    return Grouping(meaning.kind, stateless, apply, neighborhood=neighborhood)


def hk_cosine(settings: Settings) -> Grouping:
    """Eq. (13), or the radius whose share of linked pairs is `1 - tau`."""
    return _interaction("cosine", settings)


def hk_euclidean(settings: Settings) -> Grouping:
    """Eq. (12): a raw radius, or one on unit vectors (spec A3 on what tau means there)."""
    return _interaction("ball", settings)


def hk_band(settings: Settings) -> Grouping:
    """Eq. (14)."""
    return _interaction("band", settings)
