"""The aggregation rules: each is a row of independent choices, and any choice composes.

To add a rule, add a row to `RULES`; to add a choice, see `choices`. Rows hold names only, so
reading them does not load jax.
"""

from __future__ import annotations

from typing import NamedTuple

from fedjax_hk.settings.choices import GROUPINGS, TABLES, Choice


class Rule(NamedTuple):
    """What a round does, choice by choice (the flags of the same names override them).

    Attributes:
      grouping: who is grouped with whom.
      local: local objective.
      within: weights of the members of a coalition: `uniform`, `samples`, `distance`
        (samples, times more the farther the model went) or `krum` (uniform over the trusted).
      between: weights of the coalitions, `equal` (eq. 16), `size` or `samples`.
      serve: what clients start from and are judged with: the `global` model, or the
        barycenter of their own `coalition`.
      select: who takes part: `uniform`, `distance_decay` (fewer and fewer, farthest first),
        or one client that holds the windows of all, `pooled`.
      align: `neurons` matches the hidden neurons of the clients before anything compares or
        averages their models, `none` does not.
      opinion: what the grouping compares: `weights`, `update` or `centered`.
      average: what the server makes of models and weights: `mean`, `nova`, `median` or
        `trimmed_mean`.
      server_opt: what the server does with the average.
    """

    grouping: str = "none"
    local: str = "plain"
    within: str = "samples"
    between: str = "samples"
    serve: str = "global"
    select: str = "uniform"
    align: str = "none"
    opinion: str = "weights"
    average: str = "mean"
    server_opt: str = "mean"

    @property
    def weighs_alike(self) -> bool:
        """Whether weights are the same under any grouping (eqs. 15 and 16 depend on it)."""
        return (self.within, self.between) in (("uniform", "size"), ("samples", "samples"))


_UNIFORM = Rule(within="uniform", between="size")
_COALITIONS = Rule(within="uniform", between="equal")  # eqs. (15) and (16) of the paper

RULES: dict[str, Rule] = {
    # McMahan et al. 2017; eq. (2) of the FedHK paper.
    "fedavg": Rule(),
    # Li et al. 2020.
    "fedprox": Rule(local="prox"),
    # Fallah et al. 2020: the server averages uniformly.
    "perfedavg_fo": _UNIFORM._replace(local="perfedavg_fo"),
    "perfedavg_hf": _UNIFORM._replace(local="perfedavg_hf"),
    # Karimireddy et al. 2020; --local=scaffold_start is the paper's option I.
    "scaffold": _UNIFORM._replace(local="scaffold"),
    # Reddi et al. 2021.
    "fedadam": Rule(server_opt="adam"),
    "fedyogi": Rule(server_opt="yogi"),
    "fedadagrad": Rule(server_opt="adagrad"),
    # Wang et al. 2020 (NeurIPS).
    "fednova": Rule(average="nova"),
    # Wang et al. 2020 (ICLR), at fixed width and without rounds in between (spec 3.7).
    "fedma": Rule(align="neurons"),
    # The FedCW paper, eqs. (4) to (6), (8) and (9), and its two halves.
    "fedcw": Rule(select="distance_decay", within="distance"),
    "fedcw_select": Rule(select="distance_decay"),
    "fedcw_weight": Rule(within="distance"),
    # Yin et al. 2018; Blanchard et al. 2017.
    "median": _UNIFORM._replace(average="median"),
    "trimmed_mean": _UNIFORM._replace(average="trimmed_mean"),
    "multi_krum": _UNIFORM._replace(within="krum"),
    # El Hanjri et al. 2024, reconstructed (spec section 2).
    "fixed_k_euclidean": _COALITIONS._replace(grouping="fixed_k_euclidean"),
    "fixed_k_cosine": _COALITIONS._replace(grouping="fixed_k_cosine"),
    # The FedHK paper, eqs. (12), (13), (14).
    "hk_euclidean": _COALITIONS._replace(grouping="hk_euclidean"),
    "hk_cosine": _COALITIONS._replace(grouping="hk_cosine"),
    "hk_band": _COALITIONS._replace(grouping="hk_band"),
    # Tian 2022, affinity propagation; Islam et al. 2024, one shot. Each coalition has its
    # own FedAvg.
    "wscc": Rule(grouping="affinity_propagation", serve="coalition"),
    "fedclust": Rule(grouping="agglomerative", serve="coalition"),
    # References: the true groups (of the embedded fleet), and no borders at all.
    "oracle": Rule(grouping="planted", serve="coalition"),
    "centralized": Rule(select="pooled"),
    # No federation: everybody is alone and keeps the own model.
    "local": _COALITIONS._replace(grouping="singletons", serve="coalition"),
}

# Choices that a flag of the same name replaces.
CHOICES: dict[str, dict[str, Choice]] = {
    name: TABLES[name] for name in Rule._fields if name != "grouping"
}

# Groupings that do not look at opinions.
NO_OPINIONS = tuple(name for name, choice in GROUPINGS.items() if not choice.looks)
