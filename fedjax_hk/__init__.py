"""Federated learning over fleets of meters, with coalitions from opinion dynamics.

Importing the package imports neither jax nor anything heavy; import the part you need,
such as `from fedjax_hk import hk`.
"""

__version__ = "0.1.0"
