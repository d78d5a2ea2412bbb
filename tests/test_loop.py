"""A run goes on after whatever ends it, to the same bits."""

import os
import shutil
import signal

import pandas as pd
import pytest
from small_run import ROUNDS, Killed, Ran, assert_same_run, prepared_with, settings, stop_at

from fedjax_hk.run import contents, loop, resume, sinks
from fedjax_hk.store import run_folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The run that most tests look at."""
    return Ran(prepared_with(), tmp_path_factory.mktemp("runs") / "run")


def test_same_seed_same_bits_and_another_seed_others(ran, tmp_path):
    assert_same_run(Ran(prepared_with(), tmp_path / "again"), ran)
    other = Ran(prepared_with(seed=1), tmp_path / "other")
    assert other.csv("coalitions")["client"].tolist() != ran.csv("coalitions")["client"].tolist()
    assert (other.csv("rounds")["train_loss"] != ran.csv("rounds")["train_loss"]).all()


# What comes from the device together


def test_order_in_which_a_round_is_written_down(tmp_path, monkeypatch):
    """Tables, callbacks, terminal, notes, results, checkpoint; the last two where they are due."""
    seen = []
    for name in ("Table", "Callback", "Terminal", "Note", "Checkpoint"):
        sink = getattr(sinks, f"{name}Sink")

        def on_round(self, record, name=name, plain=sink.on_round):
            seen.append((record.number, name, record.kept is not None))
            plain(self, record)

        monkeypatch.setattr(sink, "on_round", on_round)
    end, save = contents.end, loop.Checkpoints.save

    def ending(*given):
        seen.append("end")
        return end(*given)

    def saving(self, number, state):
        seen.append(f"save {number}")
        save(self, number, state)

    monkeypatch.setattr(contents, "end", ending)
    monkeypatch.setattr(loop.Checkpoints, "save", saving)
    Ran(prepared_with(rounds_per_sync=3), tmp_path / "run")
    expected = []
    for number, last in ((1, False), (2, False), (3, True), (4, True)):
        expected += [(number, name, last) for name in ("Table", "Callback", "Terminal", "Note")]
        expected += ["end"] * (number == 4) + [(number, "Checkpoint", last)]
        expected += [f"save {number}"] * last
    assert seen == expected


def test_three_rounds_at_once_give_the_same_tables(ran, tmp_path):
    chunked = Ran(prepared_with(rounds_per_sync=3), tmp_path / "run")
    assert [number for number, _ in chunked.seen] == [1, 2, 3, 4]
    assert_close_run(chunked, ran)


def assert_close_run(one, other):
    for name in ("rounds", "coalitions", "clients"):
        tables = [run.csv(name) for run in (one, other)]
        if name == "rounds":
            tables = [table.drop(columns="seconds") for table in tables]
        pd.testing.assert_frame_equal(*tables, rtol=1e-5, atol=1e-5)


def test_a_signal_ends_a_run_after_the_rounds_on_the_device(ran, tmp_path, capfd):
    prepared = prepared_with(rounds_per_sync=3)
    stopped = Ran(prepared, tmp_path / "run", [stop_at(1)])
    assert stopped.outcome.stopped == "SIGTERM"
    assert "SIGTERM: up to 3 rounds on the device end and are saved" in capfd.readouterr().err
    assert len(stopped.outcome.rounds) == 3
    assert sorted(os.listdir(stopped.path / "checkpoints")) == ["3"]
    resumed = Ran(prepared, stopped.path, resume=True)
    assert [number for number, _ in resumed.seen] == [4]
    assert_close_run(resumed, ran)


def test_killed_within_rounds_that_came_together(ran, tmp_path):
    """Rows of two of them are there, the checkpoint is not: they are done again."""

    def killed(number, row):
        if number == 2:
            raise Killed

    prepared = prepared_with(rounds_per_sync=3)
    path = tmp_path / "run"
    with pytest.raises(Killed):
        Ran(prepared, path, [killed])
    assert len(pd.read_csv(path / "rounds.csv")) == 2
    resumed = Ran(prepared, path, resume=True)
    assert [number for number, _ in resumed.seen] == [1, 2, 3, 4]
    assert_close_run(resumed, ran)


# Interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_round(number, ran, tmp_path, capfd):
    name = signal.Signals(number).name
    stopped = Ran(prepared_with(), tmp_path / "run", [stop_at(2, number)])
    assert stopped.outcome.stopped == name
    assert stopped.outcome.clients is None
    assert stopped.outcome.text == ""
    assert len(stopped.outcome.rounds) == 2
    assert f"{name}: this round ends and is saved" in capfd.readouterr().err
    resumed = Ran(prepared_with(), stopped.path, resume=True)
    assert [number for number, _ in resumed.seen] == [3, 4]
    assert_same_run(resumed, ran)


def test_a_signal_in_the_last_round_does_not_stop_a_run_that_is_done(ran, tmp_path):
    run = Ran(prepared_with(), tmp_path / "run", [stop_at(ROUNDS)])
    assert run.outcome.stopped == ""
    assert_same_run(run, ran)


@pytest.mark.parametrize(
    "changes",
    [
        {"serve": "coalition", "client_opt_reset": False, "gradient_spread": True},
        pytest.param(
            {"agg": "fixed_k_cosine", "tau": None, "server_opt": "adam", "num_coalitions": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["clients' models and Adam", "centers and server Adam"],
)
def test_every_state_survives(changes, tmp_path):
    prepared = prepared_with(**changes)
    whole = Ran(prepared, tmp_path / "whole")
    stopped = Ran(prepared, tmp_path / "run", [stop_at(2)])
    assert_same_run(Ran(prepared, stopped.path, resume=True), whole)
    if "gradient_spread" in changes:
        assert (whole.csv("rounds")[["gradient_spread", "gradient_norm"]] > 0).all(axis=None)


@pytest.mark.parametrize("at", ["tables", "coalitions", "summary"])
@pytest.mark.parametrize("round_number", [3, ROUNDS])
def test_killed_between_the_tables_and_the_checkpoint(at, round_number, ran, tmp_path, monkeypatch):
    """At every step of writing a round down."""
    if at == "summary" and round_number < ROUNDS:
        pytest.skip("written in the last round only")

    def kill_at(owner, name, when):
        original = getattr(owner, name)

        def patched(*args):
            if when(*args):
                raise Killed
            return original(*args)

        monkeypatch.setattr(owner, name, patched)

    if at == "tables":  # all is written but the checkpoint
        kill_at(loop.Checkpoints, "save", lambda self, number, state: number == round_number)
    elif at == "coalitions":  # coalitions.csv has the round, rounds.csv has not
        kill_at(
            run_folder.RunFolder,
            "append_rows",
            lambda self, table, rows: table == "rounds" and rows[0]["round"] == round_number,
        )
    else:
        kill_at(run_folder.RunFolder, "write_text", lambda self, name, text: name == "summary.txt")
    path = tmp_path / "run"
    with pytest.raises(Killed):
        Ran(prepared_with(), path)
    monkeypatch.undo()
    assert not resume.is_finished(path, settings())
    if at == "coalitions":
        with open(path / "rounds.csv", "ab") as file:
            file.write(b"3,5,5,0.0")  # and a torn row
    resumed = Ran(prepared_with(), path, resume=True)
    assert [number for number, _ in resumed.seen] == list(range(round_number, ROUNDS + 1))
    assert_same_run(resumed, ran)


def test_without_any_checkpoint_it_starts_at_round_one(ran, tmp_path):
    path = shutil.copytree(ran.path, tmp_path / "run")
    shutil.rmtree(path / "checkpoints")
    resumed = Ran(prepared_with(), path, resume=True)
    assert [number for number, _ in resumed.seen] == [1, 2, 3, 4]
    assert_same_run(resumed, ran)


def test_an_older_checkpoint_is_taken_if_the_newest_is_torn(ran, tmp_path):
    path = shutil.copytree(ran.path, tmp_path / "run")
    for file in (path / "checkpoints" / "4").rglob("*"):
        if file.is_file() and "metadata" not in file.name.lower():
            file.write_bytes(b"")
    resumed = Ran(prepared_with(), path, resume=True)
    assert [number for number, _ in resumed.seen] == [4]
    assert "checkpoint of round 4 left out" in resumed.log
    assert_same_run(resumed, ran)


def test_more_rounds_equal_a_longer_run(ran, tmp_path):
    longer = Ran(prepared_with(rounds=6), tmp_path / "longer")
    path = shutil.copytree(ran.path, tmp_path / "run")
    resumed = Ran(prepared_with(rounds=6), path, resume=True)
    assert [number for number, _ in resumed.seen] == [5, 6]
    assert_same_run(resumed, longer)


def test_a_stale_summary_is_not_taken_for_the_end(ran, tmp_path, monkeypatch):
    """A finished run goes on for more rounds and is killed before its new summary."""
    path = shutil.copytree(ran.path, tmp_path / "run")

    def killed(*_):
        raise Killed

    monkeypatch.setattr(contents, "end", killed)
    with pytest.raises(Killed):
        Ran(prepared_with(rounds=6), path, resume=True)
    monkeypatch.undo()
    assert len(pd.read_csv(path / "rounds.csv")) == 6
    assert (path / "summary.txt").exists()
    assert not resume.is_finished(path, settings(rounds=6))
    resumed = Ran(prepared_with(rounds=6), path, resume=True)
    assert "after 6 rounds" in resumed.outcome.text


def test_resuming_a_finished_run_trains_nothing(ran, tmp_path):
    path = shutil.copytree(ran.path, tmp_path / "run")
    resumed = Ran(prepared_with(), path, resume=True)
    assert resumed.seen == []
    assert_same_run(resumed, ran)
    assert resumed.outcome.text == ran.outcome.text
    assert len(resumed.outcome.clients) == 7
