"""What a threshold means: ranges, limits, texts, words of every meaning."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_hk import hk
from fedjax_hk.rules.hegselmann_krause import NEIGHBORHOODS
from fedjax_hk.settings.config import Config
from fedjax_hk.settings.thresholds import MEANINGS, meaning_of, near
from fedjax_hk.types import HParams

OUTRIGHT = [name for name, one in MEANINGS.items() if one.flag]


@pytest.mark.parametrize("name", OUTRIGHT)
def test_limits_and_texts_are_inverse(name):
    meaning = MEANINGS[name]
    for limit in (1e-6, 0.01, 0.3, 0.9):
        text = meaning.text(limit)
        assert meaning.limit(float(text)) == pytest.approx(limit, rel=2e-3)
        assert text in meaning.flag.format(text)
        assert meaning.low <= float(text) <= meaning.high


@pytest.mark.parametrize("name", [name for name in NEIGHBORHOODS if MEANINGS[name].flag])
@pytest.mark.parametrize("value", [0.2, 0.9, 0.999])
def test_limits_are_those_of_the_rules(name, value):
    meaning = MEANINGS[name]
    hparams = HParams(**{setting: np.float32(value) for setting in meaning.settings[:1]})
    found = NEIGHBORHOODS[name](hparams, np.eye(2), np.ones(2, bool))
    assert isinstance(found, hk.Neighborhood)
    assert found.kind == meaning.kind
    np.testing.assert_allclose(float(found.limit), meaning.limit(value), rtol=1e-4)


def test_every_meaning_is_reached():
    configs = [
        Config(), Config(agg="hk_band"), Config(agg="hk_euclidean"), Config(tau_mode="quantile"),
        Config(agg="hk_band", tau_mode="quantile"), Config(agg="hk_euclidean", epsilon=1.0),
        Config(agg="hk_euclidean", euclid_tau="matched"), Config(agg="fedclust"),
        Config(agg="hk_euclidean", euclid_tau="linear"), Config(agg="fedclust", epsilon=1.0),
    ]  # fmt: skip
    assert {meaning_of(one).name for one in configs} == set(MEANINGS)
    assert len({near(one) for one in configs}) == len(configs)
    assert meaning_of(Config(agg="fedavg")) is None and near(Config(agg="fedavg")) == ""
