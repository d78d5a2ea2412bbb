"""Networks as functions of one parameter vector."""

from fedjax_hk.models.model import Model, alive_params, from_flax, lstm_forecaster

__all__ = ["Model", "alive_params", "from_flax", "lstm_forecaster"]
