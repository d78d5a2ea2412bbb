"""Which settings cannot be run, and which do not go together; loads neither jax nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedjax_hk.settings.choices import TABLES, Choice
from fedjax_hk.settings.config import (
    SETTINGS,
    TASK_OF,
    Config,
    ConfigError,
    choices_of,
    is_read,
    readers,
    value_of,
)
from fedjax_hk.settings.rules import RULES, Rule
from fedjax_hk.settings.setting import problem
from fedjax_hk.settings.thresholds import meaning_of

MOST_ROWS = 4  # rules that are named one by one where a setting is not read


def check(config: Config) -> None:
    """Refuses settings that cannot be run, all problems at once.

    Errors: ConfigError; each line names the flag, the value and the fix.
    """
    problems = list(_check_values(config))
    if not problems:  # what goes together is judged only for values that mean something
        problems = list(_check_together(config))
    if problems:
        raise ConfigError("\n".join(problems))


def check_fleet(config: Config, num_clients: int) -> int:
    """Clients a round, once the fleet is known.

    Errors: ConfigError if more are asked for than there are.
    """
    cohort = min(50, num_clients) if config.clients_per_round is None else config.clients_per_round
    if cohort > num_clients:
        raise ConfigError(
            f"--clients_per_round={cohort}: the fleet has {num_clients} "
            f"clients; give at most {num_clients}."
        )
    for name, known in SETTINGS.items():
        value = getattr(config, name)
        if known.in_cohort and value is not None and value > cohort:
            raise ConfigError(
                f"--{name}={value}: a round has {cohort} clients; give at most {cohort}."
            )
    return cohort


def _check_values(config: Config) -> Iterator[str]:
    for name, known in SETTINGS.items():
        value = getattr(config, name)
        if fix := problem(known, value):
            yield f"--{name}={value}: {fix}"


def _check_together(config: Config) -> Iterator[str]:
    made = choices_of(config)
    yield from _check_read(config, made)
    if TABLES["loss"][made["loss"][0]].task != made["task"][0]:
        fitting = [one for one, loss in TABLES["loss"].items() if loss.task == made["task"][0]]
        yield (
            f"--loss={config.loss}: --samples={config.samples} cannot be trained with it; choose "
            f"one of {', '.join(fitting)}."
        )
    yield from _check_sources(config)
    yield from _check_thresholds(config)
    yield from _check_choices(config, config.rule())


# What no choice reads


def _check_read(config: Config, made: dict[str, tuple[str, Choice]]) -> Iterator[str]:
    """Settings that were given and that none of the choices reads."""
    for name, known in SETTINGS.items():
        value = getattr(config, name)
        if value != known.default and not is_read(name, made):
            who, instead = _readers_in_words(config, name, made)
            yield (f"--{name}={value}: {who} does not read it; leave it out, or use {instead}.")


def _readers_in_words(
    config: Config, name: str, made: dict[str, tuple[str, Choice]]
) -> tuple[str, str]:
    """Whose choice it is that a setting means nothing, and the flags under which it does."""
    found = readers(name)
    first = next(iter(found))
    if first not in Rule._fields:
        if first not in made:  # a choice that is itself not read, such as how readings are dealt
            return _readers_in_words(config, first, made)
        return f"--{first}={made[first][0]}", _flags(found)
    rows = [agg for agg, rule in RULES.items() if any(getattr(rule, t) in found[t] for t in found)]
    rows.sort(key=lambda agg: agg != SETTINGS["agg"].default)  # the usual one first
    if len(rows) > MOST_ROWS:
        return f"--agg={config.agg}", f"a rule that does, such as --agg={rows[0]}"
    return f"--agg={config.agg}", _flags(found | ({"agg": rows} if rows else {}))


def _flags(named: dict[str, list[str]]) -> str:
    """`--local=prox or --agg=fedprox`; a table without a flag of its own is left out."""
    flags = [f"--{flag}={_either(names)}" for flag, names in named.items() if flag in SETTINGS]
    return (", or " if any(" or " in one for one in flags) else " or ").join(flags)


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# What contradicts something else


def _given(config: Config, *names: str) -> dict[str, Any]:
    """Those of the settings that are not as they are by default."""
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value != SETTINGS[name].default}


def _check_sources(config: Config) -> Iterator[str]:
    """The embedded fleet or files, not both."""
    if config.data:
        for name, value in _given(config, "fleet_clients", "fleet_days").items():
            yield (
                f"--{name}={value}: it shapes the embedded fleet, which --data replaces; leave "
                "one of them out."
            )
        return
    if config.clients:
        yield f"--clients={config.clients}: it picks columns of --data; give both."
    # --active_factor and --min_days are in the paper's preset, which also fits the embedded
    # fleet: that stands for households chosen so already.
    for name, value in _given(config, "data_format", "resample", "timezone").items():
        yield f"--{name}={value}: it says how to read --data; give both."


def _check_thresholds(config: Config) -> Iterator[str]:
    meaning = meaning_of(config)
    if meaning is None:
        return
    if meaning.settings == ("epsilon",):
        for name, value in _given(config, "tau", "euclid_tau", "tau_mode").items():
            yield (
                f"--epsilon={config.epsilon} and --{name}={value}: one is a radius of raw "
                "opinions, the other belongs to unit vectors; keep one."
            )
        return
    for name in meaning.settings:
        value = getattr(config, name)
        if value is not None and not meaning.low <= value <= meaning.high:
            yield (
                f"--{name}={value}: it is {meaning.noun} here; give a number from "
                f"{meaning.low:g} to {meaning.high:g}."
            )
    numbers = [value_of(config, name) for name in meaning.settings]
    if numbers != sorted(numbers):
        lower, upper = meaning.settings
        yield (
            f"--{lower}={numbers[0]} is above --{upper}={numbers[1]}: nobody would be a neighbor; "
            "swap them."
        )


def _check_choices(config: Config, rule: Rule) -> Iterator[str]:
    """Choices that contradict each other, with the reason."""
    control = rule.local.startswith("scaffold")
    if rule.serve == "coalition":
        yield from _check_served(config, rule, control)
    if rule.align == "neurons":
        moved = {
            "client_opt_reset=False": not config.client_opt_reset,
            f"local={rule.local}": control,
            f"personal_layers={config.personal_layers}": bool(config.personal_layers),
        }
        for flag in (flag for flag, given in moved.items() if given):
            yield (
                f"--{flag}: --align=neurons puts a model's neurons into another order, in which "
                "what a client keeps has no meaning; leave one of them out."
            )
    if rule.select == "pooled":
        alone = {
            f"attack={config.attack}": config.attack != "none",
            f"drop_rate={config.drop_rate}": config.drop_rate > 0,
            f"personal_layers={config.personal_layers}": bool(config.personal_layers),
            f"local={rule.local}": control,
            f"serve={rule.serve}": rule.serve != "global",
            f"clients_per_round={config.clients_per_round}": config.clients_per_round is not None,
        }
        for flag in (flag for flag, given in alone.items() if given):
            yield (
                f"--{flag}: --select=pooled trains one model on the windows of all clients, so "
                "there are no clients that this could mean; leave it out."
            )
    if rule.grouping == "planted" and (config.data or TASK_OF[config.samples] != "forecast"):
        other = f"--data={config.data}" if config.data else f"--samples={config.samples}"
        yield (
            f"{other}: the true groups that --agg={config.agg} uses are known for the embedded "
            "fleet only; use a rule that finds groups, such as --agg=hk_cosine."
        )


def _check_served(config: Config, rule: Rule, control: bool) -> Iterator[str]:
    """What does not go with `serve=coalition`."""
    if rule.grouping == "none":
        yield (
            f"--serve=coalition: --agg={config.agg} forms no coalitions; use a rule that does, "
            "such as --agg=hk_cosine, or leave it out."
        )
    if rule.server_opt != "mean":
        yield (
            f"--server_opt={rule.server_opt}: it steps the global model, which nobody is served "
            "with --serve=coalition; use --server_opt=mean or --serve=global."
        )
    if rule.average != "mean":
        yield (
            f"--average={rule.average}: it makes the global model, which nobody is served with "
            "--serve=coalition; use --average=mean or --serve=global."
        )
    if control:
        yield (
            f"--local={rule.local}: control variates pull every client to the fleet's optimum, "
            "away from its coalition's; use --serve=global or another --local."
        )
