"""The command: flags, refusals, help, and real processes that are stopped and killed."""

import dataclasses
import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pandas as pd
import pytest
from conftest import COMPILE_LESS

from fedjax_hk import forecast as forecast_lib
from fedjax_hk import main as main_lib
from fedjax_hk.round.state import RoundState, ServerState
from fedjax_hk.run import devices
from fedjax_hk.run import prepare as prepare_lib
from fedjax_hk.settings import checks
from fedjax_hk.settings import flags as flags_lib
from fedjax_hk.settings.config import Config, ConfigError
from fedjax_hk.store.checkpoint import Checkpoints

TINY = ("--fleet_clients=6", "--fleet_days=60", "--epochs=1", "--clients_per_round=3")
ONE_DEVICE = "--devices=1"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(jax.devices()) == 2  # jax has started, so that no test chooses the devices


@pytest.fixture
def refused(capfd):
    """Runs the command in this process; returns what it said when it refused."""

    def call(*flags: str) -> str:
        before = sorted(pathlib.Path().rglob("*"))
        assert main_lib.main(["main", *flags]) == 2
        out, err = capfd.readouterr()
        assert err.startswith("Error:\n  ")
        assert "Traceback" not in err + out
        assert sorted(pathlib.Path().rglob("*")) == before  # no run folder is left behind
        return err

    return call


def parse(*flags: str) -> Config:
    return flags_lib.parse(["main", *flags])[0]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--tua=0.9", "--tua: there is no such flag; did you mean --tau"),
        ("--agregation=fedavg", "--agregation: there is no such flag"),
        ("--noclient_opt_rest", "did you mean --client_opt_reset"),
        ("--round=3", "did you mean --rounds"),
        ("--resme=runs/a", "did you mean --resume"),
        ("--xyzzy", "--xyzzy: there is no such flag; see --help"),
        ("--agg=hk_cosin", "--agg=hk_cosin: not known; did you mean hk_cosine? choose one of"),
        ("--loss=MAD", "--loss=MAD: not known; choose one of mse, mae, huber, quantile"),
        ("--rounds=ten", "--rounds=ten: give a whole number"),
        ("--rounds=2.5", "--rounds=2.5: give a whole number"),
        ("--rounds=", "--rounds=: give a whole number"),
        ("--tau=high", "--tau=high: give a number"),
        ("--tau=0,9", "--tau=0,9: give a number"),
        ("--client_opt_reset=maybe", "--client_opt_reset=maybe: give true or false"),
        ("--tau", "--tau: it has no value; write --tau=VALUE"),
        ("hk_cosine", "'hk_cosine' is no flag; write flags as --name=value"),
        ("--flagfile=none.flags", "--flagfile: cannot read it"),
        ("--tau=nan", "--tau=nan: give a finite number"),
        ("--epsilon=inf", "--epsilon=inf: give a finite number"),
        ("--rounds=0", "--rounds=0: give 1 or more"),
        ("--rounds_per_sync=0", "--rounds_per_sync=0: give 1 or more"),
        ("--resume=", "--resume=: give the folder of an earlier run"),
        ("--resume=nowhere", "--resume: nowhere does not exist"),
        ("--data=nowhere.csv", "nowhere.csv"),
        ("--clients=h1", "--clients=h1: it picks columns of --data"),
        ("--lookback=500", "No client has enough readings for look-back 500"),
        ("--fleet_clients=6 --clients_per_round=7", "--clients_per_round=7: the fleet has 6"),
        ("--fleet_clients=6 --devices=3", "--devices=3: there are 2 (cpu)"),
        ("--agg=fedavg --tau=0.9", "--tau=0.9: --agg=fedavg does not read it"),
        ("--output=/dev/null/run", "--output: cannot write /dev/null/run"),
        ("--output=/proc/run", "--output: cannot write /proc/run"),
    ],
)
def test_wrong_flags_are_refused(flag, said, refused):
    assert said in refused(*flag.split())


def test_all_problems_are_said_at_once(refused):
    said = refused("--rounds=0", "--tau=nan", "--epochs=-1")
    assert "--rounds=0" in said
    assert "--tau=nan" in said
    assert "--epochs=-1" in said


def test_output_folder_must_be_new_or_empty(refused, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    said = refused(*TINY, "--output=full")
    assert "full is not empty (found: notes.txt)" in said
    (tmp_path / "file").write_text("mine")
    assert "file is a file" in refused(*TINY, "--output=file")


def test_bad_cell_of_a_data_file_is_named(refused, tmp_path):
    rows = [f"2020-01-{day:02},1.5,2.5" for day in range(1, 31)]
    rows[9] = "2020-01-10,1.5,oops"
    (tmp_path / "meters.csv").write_text("\n".join(["time,a,b", *rows]))
    said = refused("--data=meters.csv")
    assert "meters.csv, row 11, column 3, client 'b': the reading is 'oops'" in said
    assert "c" in refused("--data=meters.csv", "--clients=c")


def test_settings_that_do_not_fit_the_model_leave_no_folder(refused):
    said = refused(*TINY, ONE_DEVICE, "--opinion_leaves=conv", "--output=run")
    assert "--opinion_leaves=conv" in said
    assert "lstm_0/kernel" in said


def test_a_folder_that_was_given_stays(refused, tmp_path):
    (tmp_path / "run").mkdir()
    refused(*TINY, ONE_DEVICE, "--opinion_leaves=conv", "--output=run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_signal_while_compiling(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_lib, "prepare", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    assert main_lib.main(["main", *TINY, ONE_DEVICE, "--output=run"]) == 143
    out, err = capfd.readouterr()
    assert "SIGTERM: the round is compiled first" in err
    assert "Stopped by SIGTERM while the round was compiled; go on with" in out
    assert "--resume=run" in out
    assert (tmp_path / "run" / "config.json").exists()


def test_boolean_flags_in_all_spellings():
    assert parse().client_opt_reset
    for flag in ("--noclient_opt_reset", "--client_opt_reset=False", "--client_opt_reset=false"):
        assert not parse(flag).client_opt_reset
    for flag in ("--client_opt_reset", "--client_opt_reset=true"):
        assert parse(flag).client_opt_reset
    assert parse("--gradient_spread").gradient_spread


def test_flags_without_a_value_are_the_defaults_of_config():
    assert parse() == Config()
    config, given, resume = flags_lib.parse(["main", "--tau=0.5", "--rounds=20"])
    assert config == Config(tau=0.5)
    assert given == {"tau": 0.5, "rounds": 20}
    assert resume is None


def test_flagfile_with_comments(tmp_path):
    (tmp_path / "my.flags").write_text("# the paper\n\n--agg=hk_band\n// old\n--eps_lower=0.7\n")
    assert parse("--flagfile=my.flags") == Config(agg="hk_band", eps_lower=0.7)
    assert parse("--flagfile=my.flags", "--eps_lower=0.2").eps_lower == 0.2  # the last one counts
    (tmp_path / "bad.flags").write_text("--eps_lowr=0.7\n")
    with pytest.raises(ConfigError, match="did you mean --eps_lower"):
        parse("--flagfile=bad.flags")


def test_presets_are_valid():
    presets = pathlib.Path(__file__).parents[1] / "experiments" / "presets"
    files = sorted(presets.glob("*.flags"))
    assert files
    for file in files:
        config = parse(f"--flagfile={file}")
        checks.check(config)
    paper = parse(f"--flagfile={presets / 'fedhk_paper.flags'}")
    assert dataclasses.replace(paper, rounds=20) == Config(
        tau=0.9, clients_per_round=50, active_factor=1.6, min_days=730, loss="mse"
    )


def test_help_is_grouped_fast_and_loads_no_library():
    code = """
        import sys
        from fedjax_hk import main
        code = main.main(["main", "--help"])
        loaded = {name.split(".")[0] for name in sys.modules}
        heavy = {"jax", "jaxlib", "numpy", "pandas", "flax", "optax", "orbax", "tensorflow"}
        assert not loaded & heavy, loaded & heavy
        sys.exit(code)
    """
    start = time.monotonic()
    done = python("-W", "error", "-c", textwrap.dedent(code))
    assert time.monotonic() - start < 2
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for group in ("Rule:", "Choices:", "Training:", "Data:", "Run:", "Examples:"):
        assert f"\n{group}\n" in done.stdout
    for item in dataclasses.fields(Config):
        assert f"\n  --{item.name} " in done.stdout
    assert "\n  --resume " in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


# Real processes. They share a cache of compiled programs, so that only the first one compiles.

FLAGS = (
    *TINY,
    "--noreport",
    "--rounds=12",
    "--opinion=update",
    "--tau=0.5",
    "--seed=3",
)


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


class Command:
    """Runs the command as a process of its own."""

    def __init__(self, cache):
        self._environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "XLA_FLAGS": COMPILE_LESS,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start(self, *flags: str, door: str = "main") -> subprocess.Popen:
        arguments = [sys.executable, "-W", "error", "-m", f"fedjax_hk.{door}", *flags]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            arguments, stdout=pipe, stderr=pipe, text=True, env=self._environment
        )

    def run(self, *flags: str, door: str = "main") -> subprocess.CompletedProcess:
        process = self.start(*flags, door=door)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(flags, process.returncode, out, err)

    def stop(self, process, folder, rounds: int, number: int, delay: float = 0.0):
        """Sends a signal once `rounds` rounds are in the table; returns code, output, error."""
        table = folder / "rounds.csv"
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline:
            if table.exists() and table.read_bytes().count(b"\n") > rounds:
                break
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(number)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    return Command(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """A run that nothing interrupted: its folder and what it said."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = command.run(*FLAGS, f"--output={folder}")
    assert done.returncode == 0, done.stderr
    return folder, done


def last_state(folder, rounds: int):
    """The parameters in the checkpoint of a round."""
    like = RoundState(ServerState(np.zeros(7633, np.float32), (), ()), {})
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.restore(rounds, like).params


def assert_same_run(folder, other, rounds: int):
    """Bit for bit, but for the seconds that rounds took."""
    for name in ("coalitions.csv", "clients.csv", "summary.txt"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    rows, others = (pd.read_csv(f / "rounds.csv", dtype=str) for f in (folder, other))
    assert rows["round"].tolist() == [str(k) for k in range(1, rounds + 1)]
    pd.testing.assert_frame_equal(rows.drop(columns="seconds"), others.drop(columns="seconds"))
    assert last_state(folder, rounds).tobytes() == last_state(other, rounds).tobytes()


def test_what_a_run_says(whole):
    folder, done = whole
    lines = done.stderr.splitlines()
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == 12  # plain lines, as this is no terminal
    assert rounds[0].startswith("round 1/12  ")
    assert " left  MAE " in rounds[0]
    assert "\r" not in done.stderr
    assert "6 clients" in done.stdout
    assert f"Run folder: {folder}" in done.stdout
    assert "7,633 parameters" in done.stdout
    for text in ("MAE L", "the reading before", "same time last week", "mean of the last 7 days",
                 "the client's training median", "the best naive forecast"):  # fmt: skip
        assert text in done.stdout
    assert (folder / "summary.txt").read_text() in done.stdout + "\n"


def test_config_is_whole(whole):
    config = json.loads((whole[0] / "config.json").read_text())
    expected = parse(*FLAGS, f"--output={whole[0]}")
    assert config["flags"] == dataclasses.asdict(expected)
    assert {"python", "jax", "numpy", "fedjax-hk"} <= set(config["versions"])
    cores = devices.num_cores()
    assert config["device"] == {"platform": "cpu", "kind": "cpu", "count": cores}
    assert config["data"]["clients"] == 6
    assert len(config["data"]["fingerprint"]) == 64


def test_forecast_in_a_fresh_process_of_a_run_on_all_cores(command, whole, capsys, tmp_path):
    # As a user does it: nothing but the README's commands, on whatever devices each finds.
    folder = copied(whole[0], tmp_path)
    assert json.loads((folder / "config.json").read_text())["flags"]["devices"] == 0
    found = command.run(f"--run={folder}", door="forecast")
    assert found.returncode == 0, found.stderr
    assert "5 clients" in found.stderr
    assert "No forecast for h0000: a reading" in found.stderr  # a gap in the embedded fleet
    assert len(found.stdout.splitlines()) == 6
    # A folder of a version that stored the devices which it happened to have.
    config = json.loads((folder / "config.json").read_text())
    config["flags"]["devices"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    assert forecast_lib.main(["forecast", f"--run={folder}"]) == 0
    again, first = (pd.read_csv(io.StringIO(o)) for o in (capsys.readouterr().out, found.stdout))
    np.testing.assert_allclose(again["forecast"], first["forecast"], rtol=1e-5)
    assert again["client"].tolist() == first["client"].tolist()


def test_a_killed_run_goes_on_to_the_same_bits(command, whole, tmp_path):
    folder = tmp_path / "killed"
    process = command.start(*FLAGS, f"--output={folder}")
    code, _, _ = command.stop(process, folder, 4, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not (folder / "summary.txt").exists()
    done = command.run(f"--resume={folder}")
    assert done.returncode == 0, done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("round "))
    assert int(first.split()[1].split("/")[0]) >= 3  # it did not start over
    assert_same_run(folder, whole[0], 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_runs_killed_again_and_again_at_random_moments(seed, command, whole, tmp_path):
    folder, rng = tmp_path / "killed", random.Random(seed)
    process = command.start(*FLAGS, f"--output={folder}")
    command.stop(process, folder, rng.randrange(6), signal.SIGKILL, 0.2 * rng.random())
    for _ in range(2):
        process = command.start(f"--resume={folder}")
        command.stop(process, folder, rng.randrange(5, 11), signal.SIGKILL, 0.2 * rng.random())
    done = command.run(f"--resume={folder}")
    assert done.returncode == 0, done.stderr
    assert_same_run(folder, whole[0], 12)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_run_after_its_round(number, code, command, whole, tmp_path):
    folder = tmp_path / "a run"
    process = command.start(*FLAGS, f"--output={folder}")
    returned, out, err = command.stop(process, folder, 3, number)
    assert returned == code, err
    assert "Traceback" not in err
    name = signal.Signals(number).name
    done = len(pd.read_csv(folder / "rounds.csv"))
    assert 3 <= done < 12
    assert f"Stopped by {name} after round {done}; go on with" in out
    assert f"python -m fedjax_hk.main --resume='{folder}'" in out
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir())[-1] == done
    if number == signal.SIGINT:
        assert command.run(f"--resume={folder}").returncode == 0
        assert_same_run(folder, whole[0], 12)


def test_two_processes_cannot_resume_the_same_folder(command, capfd, tmp_path):
    folder = tmp_path / "run"
    process = command.start(*FLAGS, f"--output={folder}")
    try:
        while not (folder / "config.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        assert main_lib.main(["main", f"--resume={folder}"]) == 2
        assert f"process {process.pid} is running in {folder}" in capfd.readouterr().err
    finally:
        process.kill()
        process.communicate()


# Resuming in this process, with a folder that a run in this process has left.


def test_finished_run_prints_its_summary_and_trains_nothing(whole, capfd, monkeypatch):
    folder, _ = whole
    monkeypatch.setattr(prepare_lib, "prepare", None)  # nothing is prepared
    assert main_lib.main(["main", f"--resume={folder}"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert f"{folder} is finished" in out
    assert (folder / "summary.txt").read_text() in out
    assert main_lib.main(["main", f"--resume={folder}", *FLAGS]) == 0  # the same flags again


def copied(folder, tmp_path):
    return pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tau=0.7"], ["--tau: run has 0.5, you gave 0.7"]),
        (
            ["--agg=fedavg", "--seed=4"],
            ["--agg: run has 'hk_cosine', you gave 'fedavg'", "--seed: run has 3, you gave 4"],
        ),
        (["--rounds=11"], ["--rounds: run is set for 12, you gave 11"]),
        (["--agg=fedprox", "--mu=0.1"], ["--mu: run has None, you gave 0.1"]),
        (["--rounds=0"], ["--rounds: run is set for 12, you gave 0"]),
        (["--noclient_opt_reset"], ["--client_opt_reset: run has True, you gave False"]),
        (["--output=elsewhere"], ["--output: run has ", "you gave 'elsewhere'"]),
    ],
)
def test_other_flags_are_refused_with_the_differences(flags, said, whole, refused):
    err = refused(f"--resume={whole[0]}", *flags)
    assert all(line in err for line in said), err
    assert "only --rounds may grow" in err


def test_flags_of_another_version_are_named(whole, refused, tmp_path):
    folder = copied(whole[0], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["flags"]["old_flag"] = 1
    del config["flags"]["mu"]  # a flag that came later has its default
    (folder / "config.json").write_text(json.dumps(config))
    assert "--old_flag: run has 1, this version has no such flag" in refused(f"--resume={folder}")


def test_folders_that_hold_no_run_are_refused(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty holds no config.json" in refused("--resume=empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "broken" / "run.lock").touch()
    assert "config.json is not JSON" in refused("--resume=broken")
