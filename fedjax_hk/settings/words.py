"""What a run's rule does, in plain words; the sentences of each choice stand in `choices`."""

from __future__ import annotations

from typing import Any

from fedjax_hk.settings import thresholds
from fedjax_hk.settings.choices import TABLES
from fedjax_hk.settings.config import Config, choices_of, value_of


class Phrases(dict[str, Any]):
    """What sentences are made from: the choices' names, settings, `{opinions}` and `{near}`."""

    def __init__(self, config: Config):
        super().__init__(config.rule()._asdict())
        self._config = config

    def __missing__(self, name: str) -> Any:
        if name == "opinions":
            return _opinions(self._config)
        return thresholds.near(self._config) if name == "near" else value_of(self._config, name)


def rule_in_words(config: Config) -> list[str]:
    """Who is grouped with whom first, then how models are trained and averaged, then served."""
    rule = config.rule()
    said = {table: _say(config, table) for table in choices_of(config)}
    sentences = [
        said["select"],
        said["local"],
        said["align"],
        f"Parameters that match {config.personal_layers} stay at the clients."
        if config.personal_layers
        else "",
    ]
    if rule.serve == "global" and rule.select != "pooled":
        weighed = said["within"]
        if rule.grouping != "none" and not rule.weighs_alike:
            weighed = f"{said['between']}, and in a coalition {weighed}"
        sentences += [f"The global model is {said['average']}; {weighed}.", said["server_opt"]]
    if rule.serve == "coalition" and rule.grouping != "singletons":
        sentences.append(f"In a coalition, {said['within']}.")
    sentences.append(f"Each client is served and judged with {said['serve']}.")
    return [said["grouping"], " ".join(one for one in sentences if one)]


def _say(config: Config, table: str) -> str:
    """The words of the choice that the settings make."""
    words = choices_of(config)[table][1].words
    said = Phrases(config)
    return words(said) if callable(words) else words.format_map(said)


def _opinions(config: Config) -> str:
    """What the grouping compares."""
    what = _say(config, "opinion")
    if config.opinion_leaves:
        return f"{what} (only {config.opinion_leaves})"
    one_layer = TABLES["grouping"][config.rule().grouping].output_layer
    return what + (", of the output layer only" if one_layer else "")
