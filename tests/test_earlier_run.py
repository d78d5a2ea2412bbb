"""A folder of an earlier version can still be reported, compared and forecast from.

`earlier_run` was made by the version before states and columns got the names of now:
`--fleet_clients=6 --fleet_days=75 --agg=hk_cosine --opinion=update --tau=0.5 --serve=coalition
--personal_layers=output --clients_per_round=4 --rounds=2 --epochs=1 --lookback=5`.
"""

import json
import pathlib
import shutil

import numpy as np
import pytest

from fedjax_hk import compare
from fedjax_hk import forecast as forecast_lib
from fedjax_hk.report import build, load
from fedjax_hk.run.load import load_table
from fedjax_hk.settings.config import Config

# Of the version that made the folder.
FORECASTS = [0.23174615, 16.895828, 25.545204, 12.252595, 8.965436, 6.3048444]


@pytest.fixture
def earlier(tmp_path):
    return pathlib.Path(
        shutil.copytree(pathlib.Path(__file__).parent / "earlier_run", tmp_path / "run")
    )


def test_it_is_read_with_the_names_of_now(earlier):
    run = load.load_run(earlier)
    assert run.config.agg == "hk_cosine" and run.config.samples == "readings"
    assert len(run.rounds) == 2 and run.clients is not None
    assert np.isfinite(run.rounds["within_spread"]).all()
    assert "gradient_spread" in run.rounds
    assert not {"dissimilarity", "gradient_dissimilarity"} & set(run.rounds)


def test_report(earlier):
    build.write_report(earlier)
    assert (earlier / "report.html").read_text().count("<figure>") >= 6


def test_compare_with_another_seed(earlier, tmp_path):
    other = shutil.copytree(earlier, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["flags"]["seed"] = 1
    (other / "config.json").write_text(json.dumps(config))
    (method,) = compare.load_methods([earlier, other])
    assert len(method.runs) == 2
    np.testing.assert_allclose(method.headline_n, method.runs[0].clients["mae_units"])


def test_forecast(earlier):
    table = load_table(Config(fleet_clients=6, fleet_days=75))
    found, without = forecast_lib.forecast(earlier, table)
    assert without == ()
    np.testing.assert_allclose(found["forecast"], FORECASTS, rtol=1e-5)
    assert found["coalition"].tolist() == ["h0000"] * 3 + ["h0001", "h0000", "h0001"]
    assert (found["model"] == "own coalition").all()
