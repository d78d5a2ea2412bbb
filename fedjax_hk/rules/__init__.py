"""The aggregation rules: each is a row of independent choices, and any choice composes.

To add a rule, add a row to `RULES`; to add a choice, add it to the table of its module
(`OBJECTIVES` in local_training.py, `OPINIONS` in opinions.py, `PARTITIONS` in partitions.py,
`SERVER_STEPS` in server.py). Rows hold names only, so reading them does not load jax.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """What a round does, choice by choice (the flags of the same names override them).

    Attributes:
      partition: who is grouped with whom.
      local: local objective.
      within: weights of the members of a coalition, `uniform` or `samples`.
      between: weights of the coalitions, `equal` (eq. 16), `size` or `samples`.
      serve: what clients start from and are judged with: the `global` model, or the
        barycenter of their own `coalition`.
      select: who takes part.
      opinion: what the partition compares: `weights`, `update` or `centered`.
      server_opt: what the server does with the weighted average.
    """

    partition: str = "none"
    local: str = "plain"
    within: str = "samples"
    between: str = "samples"
    serve: str = "global"
    select: str = "uniform"
    opinion: str = "weights"
    server_opt: str = "mean"


_COALITIONS = Rule(within="uniform", between="equal")  # eqs. (15) and (16) of the paper

RULES: dict[str, Rule] = {
    # McMahan et al. 2017; eq. (2) of the FedHK paper.
    "fedavg": Rule(),
    # Li et al. 2020.
    "fedprox": Rule(local="prox"),
    # Fallah et al. 2020: the server averages uniformly.
    "perfedavg_fo": Rule(local="perfedavg_fo", within="uniform", between="size"),
    "perfedavg_hf": Rule(local="perfedavg_hf", within="uniform", between="size"),
    # El Hanjri et al. 2024, reconstructed (spec section 2).
    "fixed_k_euclidean": _COALITIONS._replace(partition="fixed_k_euclidean"),
    "fixed_k_cosine": _COALITIONS._replace(partition="fixed_k_cosine"),
    # The FedHK paper, eqs. (12), (13), (14).
    "hk_euclidean": _COALITIONS._replace(partition="hk_euclidean"),
    "hk_cosine": _COALITIONS._replace(partition="hk_cosine"),
    "hk_band": _COALITIONS._replace(partition="hk_band"),
    # No federation: everybody is alone and keeps the own model.
    "local": _COALITIONS._replace(partition="singletons", serve="coalition"),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "local": ("plain", "prox", "perfedavg_fo", "perfedavg_hf"),
    "within": ("uniform", "samples"),
    "between": ("equal", "size", "samples"),
    "serve": ("global", "coalition"),
    "select": ("uniform",),
    "opinion": ("weights", "update", "centered"),
    "server_opt": ("mean", "sgd", "adam", "yogi", "adagrad"),
}
