"""The data that the settings ask for."""

from __future__ import annotations

from fedjax_hk import data
from fedjax_hk.settings.choices import implementation
from fedjax_hk.settings.config import Config, image_shape_of, value_of
from fedjax_hk.types import Fleet


def load_table(config: Config) -> data.Table:
    """The readings that the settings ask for, of all clients that there are.

    Errors: DataError that names file, row, column and client.
    """
    if config.data:
        return data.read(
            config.data,
            data_format=config.data_format,
            clients=config.clients,
            unit=config.unit,
            resample=config.resample or "",
            timezone=config.timezone,
            cache=config.data_cache,
        )
    table = data.synthetic_fleet(config.fleet_clients, config.fleet_days)
    return table._replace(unit=config.unit) if config.unit else table


def load_fleet(config: Config) -> Fleet:
    """The clients' data that the settings ask for.

    Errors: DataError that names file, row, column and client.
    """
    return implementation("samples", config.samples)(config)


def readings(config: Config) -> Fleet:
    """Windows of a table of readings."""
    table = load_table(config)
    if config.data:
        table = data.choose_clients(table, config.active_factor, config.min_days)
    if config.judge == "validation":
        table = data.without_test_span(table)
    return data.build_fleet(
        table,
        lookback=config.lookback,
        horizon=config.horizon,
        scaler=config.scaler,
        scaler_scope=config.scaler_scope,
        scaler_fit=config.scaler_fit,
        gaps=config.gaps,
    )


def digits(config: Config) -> Fleet:
    return _dealt(config, data.digits())


def mnist5k(config: Config) -> Fleet:
    return _dealt(config, data.mnist5k())


def npz(config: Config) -> Fleet:
    samples = data.read_npz(
        config.data,
        image_shape=image_shape_of(config),
        max_samples=config.max_samples,
        seed=config.seed,
    )
    return _dealt(config, samples)


def leaf(config: Config) -> Fleet:
    return _dealt(config, data.read_leaf(config.data, image_shape=image_shape_of(config)))


def _dealt(config: Config, samples: data.Labelled) -> Fleet:
    """Labelled samples, dealt out to clients."""
    if config.judge == "validation":
        samples = data.without_test_samples(samples)
    partition = data.Partition(
        kind=value_of(config, "partition"),
        num_clients=value_of(config, "num_clients"),
        alpha=value_of(config, "alpha_dirichlet"),
        shards_per_client=value_of(config, "shards_per_client"),
        min_samples=value_of(config, "min_samples"),
        seed=config.seed,
    )
    return data.partition_samples(samples, partition)
