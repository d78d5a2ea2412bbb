"""What a threshold means: its range, its noun, its flag, its limit and its text in one record."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_hk.settings.choices import TABLES
from fedjax_hk.settings.config import Config, value_of


class Meaning(NamedTuple):
    """What the numbers of a threshold are.

    Attributes:
      name: a key of `MEANINGS`.
      settings: where the numbers come from.
      low, high: between which they lie.
      noun: what such a number is.
      near: when clients are neighbors (of a merge: how close groups are), with `{setting}` and
        `{share}`, the percentage of the pairs that are.
      flag: the flags that set a threshold `{}`; empty where it follows from the round's pairs.
      kind: the dissimilarity that is compared, `cosine` (1 - cos) or `ball` (distance).
      limit: threshold to the largest dissimilarity of neighbors, rounded as the rules do.
      text: limit to the threshold, with four digits of what matters: itself, or 1 - tau.
    """

    name: str
    settings: tuple[str, ...]
    low: float
    high: float
    noun: str
    near: str
    flag: str = ""
    kind: str = "cosine"
    limit: Callable[[Any], Any] | None = None
    text: Callable[[float], str] | None = None


def _digits(value: float) -> str:
    return f"{value:.4g}"


def _below_one(value: float) -> str:
    """1 - value, with four digits of the value."""
    return f"{1 - value:.{max(3, 3 - math.floor(math.log10(value)))}f}"


_TAU, _BAND = ("tau",), ("eps_lower", "eps_upper")
_ON_UNITS = "they are within tau = {tau:g} (%s) on unit vectors"

_ALL = (
    Meaning(
        "cosine", _TAU, -1.0, 1.0, "a cosine", "their cosine is at least {tau:g}",
        "--tau={}", limit=lambda tau: 1 - tau, text=_below_one,
    ),
    Meaning(
        "band", _BAND, -1.0, 1.0, "a cosine", "their cosine is from {eps_lower:g} to {eps_upper:g}",
        "--eps_lower={} --eps_upper=1", limit=lambda tau: 1 - tau, text=_below_one,
    ),
    Meaning(
        "distance", ("epsilon",), 0.0, math.inf, "a distance", "they are at most {epsilon:g} apart",
        "--epsilon={}", "ball", lambda epsilon: epsilon, _digits,
    ),
    # Unit vectors are sqrt(2 (1 - cos)) apart, so a radius r is the limit r^2 / 2.
    Meaning(
        "radius", _TAU, 0.0, 2.0, "a radius on unit vectors", _ON_UNITS % "radius", "--tau={}",
        limit=lambda tau: 0.5 * tau * tau, text=lambda limit: _digits(math.sqrt(2 * limit)),
    ),
    Meaning(
        "matched", _TAU, -1.0, 1.0, "a cosine", _ON_UNITS % "matched", "--tau={}",
        limit=lambda tau: 1 - tau, text=_below_one,
    ),
    Meaning(
        "linear", _TAU, -1.0, 1.0, "a cosine", _ON_UNITS % "linear", "--tau={}",
        limit=lambda tau: 0.5 * (2 * (1 - tau)) ** 2,
        text=lambda limit: _below_one(math.sqrt(2 * limit) / 2),
    ),
    Meaning(
        "quantile", _TAU, 0.0, 1.0, "a quantile",
        "they are among the closest {share:.3g} % of the pairs",
    ),
    Meaning(
        "quantile band", _BAND, 0.0, 1.0, "a quantile",
        "their affinity quantile is from {eps_lower:g} to {eps_upper:g}",
    ),
    Meaning(
        "merge", _TAU, 0.0, 1.0, "a quantile",
        "the distance that {share:.3g} % of the pairs stay below", kind="ball",
    ),
    Meaning(
        "merge distance", ("epsilon",), 0.0, math.inf, "a distance", "{epsilon:g}",
        "--epsilon={}", "ball", lambda epsilon: epsilon, _digits,
    ),
)  # fmt: skip
MEANINGS: dict[str, Meaning] = {meaning.name: meaning for meaning in _ALL}


def meaning(threshold: str, tau_mode: str, euclid_tau: str, use_epsilon: bool) -> Meaning:
    """What the numbers of a grouping's threshold mean.

    Args:
      threshold: of the grouping (`Choice.threshold`): `cosine`, `band`, `ball` or `merge`.
      use_epsilon: whether `epsilon`, a radius of raw opinions, is given.
    """
    if use_epsilon and threshold in ("ball", "merge"):
        return MEANINGS["merge distance" if threshold == "merge" else "distance"]
    if threshold == "merge":
        return MEANINGS["merge"]
    if tau_mode == "quantile":
        return MEANINGS["quantile band" if threshold == "band" else "quantile"]
    return MEANINGS[euclid_tau if threshold == "ball" else threshold]


def of_settings(threshold: str, settings: Any) -> Meaning:
    """The meaning under the compiled `types.Settings`."""
    return meaning(threshold, settings.tau_mode, settings.euclid_tau, settings.use_epsilon)


def meaning_of(config: Config, *, outright: bool = False) -> Meaning | None:
    """What the thresholds of a run mean; None for a grouping without one.

    Args:
      outright: as if `--tau_mode=absolute`: the meaning of a threshold that does not depend on
        the round's pairs.
    """
    threshold = TABLES["grouping"][config.rule().grouping].threshold
    tau_mode = "absolute" if outright else config.tau_mode
    use_epsilon = config.epsilon is not None
    return meaning(threshold, tau_mode, config.euclid_tau, use_epsilon) if threshold else None


def near(config: Config) -> str:
    """When one client listens to another, in words; empty without a threshold."""
    found = meaning_of(config)
    if found is None:
        return ""
    values = {name: value_of(config, name) for name in found.settings}
    share = 100 * (1 - values.get("tau", 0.0))
    return found.near.format(**values, share=share)
