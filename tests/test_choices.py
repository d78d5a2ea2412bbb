"""The tables of choices: every entry has words, and its code is where it says."""

from __future__ import annotations

import pytest

from fedjax_hk.rules import NO_OPINIONS, RULES, Rule
from fedjax_hk.settings import checks
from fedjax_hk.settings.choices import TABLES, implementation
from fedjax_hk.settings.config import SETTINGS, TASK_OF, Config, ConfigError
from fedjax_hk.settings.thresholds import meaning

CODED = (
    "grouping", "local", "serve", "select", "opinion", "average", "server_opt", "attack", "task",
    "samples",
)  # fmt: skip
NO_ATTACK = ("attack", "none")  # there is nothing to do
ALL = [(table, name) for table, choices in TABLES.items() for name in choices]

# What a rule does in any case needs no words.
SILENT = {"select": {"uniform", "pooled"}, "local": {"plain"}, "align": {"none"},
          "server_opt": {"mean"}}  # fmt: skip


@pytest.mark.parametrize(("table", "name"), [one for one in ALL if one[0] in Rule._fields])
def test_every_choice_of_a_rule_has_words(table, name):
    assert bool(TABLES[table][name].words) == (name not in SILENT.get(table, ()))


@pytest.mark.parametrize("table", CODED)
def test_every_choice_has_code(table):
    found = [implementation(table, name) for name, one in TABLES[table].items() if one.code]
    assert len(set(map(id, found))) == len(found)


def test_code_is_given_for_all_of_a_table_or_none():
    for table, choices in TABLES.items():
        coded = {bool(one.code) for name, one in choices.items() if (table, name) != NO_ATTACK}
        assert coded == {table in CODED}, table


@pytest.mark.parametrize(("table", "name"), ALL)
def test_what_choices_read_is_there(table, name):
    choice = TABLES[table][name]
    groups = {known.group for known in SETTINGS.values()}
    assert set(choice.reads) <= set(SETTINGS) | groups
    assert set(choice.unset) <= set(SETTINGS)
    if choice.threshold:  # each has a meaning, whose numbers the grouping reads
        for tau_mode in SETTINGS["tau_mode"].choices:
            for euclid_tau in SETTINGS["euclid_tau"].choices:
                for use_epsilon in (False, "epsilon" in choice.reads):
                    found = meaning(choice.threshold, tau_mode, euclid_tau, use_epsilon)
                    assert set(found.settings) <= set(choice.reads)


def test_tables_fit_the_settings():
    rule_tables = set(Rule._fields)
    assert rule_tables <= set(TABLES)
    assert set(TABLES) - set(SETTINGS) == {"grouping", "task"}
    for table in set(TABLES) & set(SETTINGS):
        assert SETTINGS[table].choices == tuple(TABLES[table])
    for agg, rule in RULES.items():
        assert all(getattr(rule, table) in TABLES[table] for table in rule_tables), agg
    tasks = set(TABLES["task"])
    assert set(TASK_OF.values()) == {one.task for one in TABLES["loss"].values()} == tasks


def test_groupings_that_do_not_look():
    assert NO_OPINIONS == ("none", "singletons", "planted")
    assert Config(agg="hk_cosine").rule().grouping not in NO_OPINIONS


def test_what_no_named_rule_reads_is_refused_with_the_choice_that_does(monkeypatch):
    # A choice that no row of RULES makes, as a new one may be.
    prox = TABLES["local"].pop("prox")
    monkeypatch.setitem(TABLES["local"], "pulled", prox)
    monkeypatch.setattr(checks, "RULES", {"fedavg": RULES["fedavg"]})
    try:
        with pytest.raises(ConfigError, match=r"leave it out, or use --local=pulled\.$"):
            checks.check(Config(agg="fedavg", mu=0.1))
    finally:
        TABLES["local"]["prox"] = prox
