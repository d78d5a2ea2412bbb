"""Networks as functions of one parameter vector."""

from fedjax_hk.models.classifiers import classifier
from fedjax_hk.models.lstm import lstm_forecaster
from fedjax_hk.models.model import Model, alive_params, from_flax

__all__ = ["Model", "alive_params", "classifier", "from_flax", "lstm_forecaster"]
