"""What a rule does, in words: every choice has its own."""

from __future__ import annotations

import pytest

from fedjax_hk.rules import RULES
from fedjax_hk.settings.config import Config
from fedjax_hk.settings.words import rule_in_words


def test_no_two_rules_read_the_same():
    # Option II of SCAFFOLD is a row, option I a choice; halves of FedCW are rows.
    said = {agg: tuple(rule_in_words(Config(agg=agg))) for agg in RULES}
    said["scaffold_start"] = tuple(rule_in_words(Config(agg="scaffold", local="scaffold_start")))
    assert len(set(said.values())) == len(said)
    for sentences in said.values():
        assert all(one.endswith(".") and "  " not in one for one in sentences)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(agg="hk_cosine", tau=0.7), "their cosine is at least 0.7"),
        (Config(agg="hk_cosine", tau_mode="quantile", tau=0.95), "closest 5 % of the pairs"),
        (Config(agg="hk_euclidean", epsilon=2.5), "at most 2.5 apart"),
        (Config(agg="hk_euclidean", tau=0.9), "within tau = 0.9 (radius)"),
        (Config(agg="hk_band"), "their cosine is from 0.5 to 1"),
        (Config(agg="hk_cosine"), "every coalition weighs the same, and in a coalition clients"),
        (Config(agg="fedclust"), "the distance that 50 % of the pairs stay below"),
        (Config(agg="fedclust", epsilon=0.3), "groups closer than 0.3 merge (average linkage)"),
        (Config(agg="wscc"), "who chooses the same one is a coalition"),
        (Config(agg="oracle"), "true groups"),
        (Config(agg="fixed_k_cosine", num_coalitions=4), "around 4 centers"),
        (Config(agg="median"), "the median of the clients' models"),
        (Config(agg="trimmed_mean", trim=0.1), "without 10 % of them at each end"),
        (Config(agg="multi_krum"), "the models of 20 % of the clients"),
        (Config(agg="centralized"), "nothing is federated"),
        (Config(agg="fedcw", beta=-0.5), "and less the farther their models went (beta = -0.5)"),
        (Config(agg="fedadam", server_lr=0.1), "a gradient of Adam, learning rate 0.1"),
        (Config(agg="fedavg", personal_layers="Dense"), "Parameters that match Dense stay"),
        (Config(agg="hk_cosine", serve="coalition"), "the model of its own coalition"),
        (Config(agg="local"), "its own model"),
    ],
)
def test_words(config, words):
    assert words in " ".join(rule_in_words(config))
