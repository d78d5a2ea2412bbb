"""Hegselmann-Krause coalitions for JAX. Imports jax and NumPy only; copy the folder freely.

    from fedjax_hk import hk

    result = hk.interact(opinions, hk.cosine(0.9))        # [S, D] or a pytree of [S, ...]
    model = hk.average(models, result.weights_s)          # one model
    models = hk.barycenters(models, result.labels_s)      # each client its coalition's

Works inside `jit`, `vmap`, `grad`, `scan` and `shard_map`, and needs no global flag.
Results are float32, int32 and bool.

precision.py     float64 for the [S, S] stage, under every transformation
affinity.py      inner products of opinions, and dissimilarities from them
neighborhood.py  who listens to whom
dynamics.py      the interaction until rest -> HKResult
coalitions.py    coalitions, their weights and barycenters
"""

from .affinity import UnitGram, dissimilarity, gram_matrix, inner_products
from .coalitions import average, barycenters, client_weights, coalition_sizes, components
from .dynamics import HKResult, interact, interact_from_gram
from .neighborhood import Neighborhood, ball, band, cosine, unit_ball

__all__ = [
    "HKResult",
    "Neighborhood",
    "UnitGram",
    "average",
    "ball",
    "band",
    "barycenters",
    "client_weights",
    "coalition_sizes",
    "components",
    "cosine",
    "dissimilarity",
    "gram_matrix",
    "inner_products",
    "interact",
    "interact_from_gram",
    "unit_ball",
]
