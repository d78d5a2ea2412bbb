"""Progress on terminals and files, requests to stop, tables."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import types

import pytest

from fedjax_hk.report.text import format_table
from fedjax_hk.run import terminal
from fedjax_hk.run.terminal import Progress, StopRequest, exit_code


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move: clock[0] seconds."""
    now = [100.0]
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_plain_lines_one_a_round(clock):
    stream = io.StringIO()
    with Progress(20, stream=stream) as progress:
        clock[0] += 10
        progress.update(1, "loss 0.5")
        clock[0] += 2
        progress.update(2, "loss 0.4")
        progress.say("one coalition: same as FedAvg")
        clock[0] += 4
        progress.update(3)
    assert stream.getvalue() == (
        "round 1/20  0:00:10 elapsed, 0:03:10 left  loss 0.5\n"
        "round 2/20  0:00:12 elapsed, 0:00:36 left  loss 0.4\n"  # the first one compiled
        "one coalition: same as FedAvg\n"
        "round 3/20  0:00:16 elapsed, 0:00:51 left\n"
    )


def test_time_left_after_resume_comes_from_this_process(clock):
    stream = io.StringIO()
    with Progress(20, done=18, stream=stream) as progress:
        clock[0] += 30
        progress.update(19)
        clock[0] += 3600
        progress.update(20)
    assert stream.getvalue() == (
        "round 19/20  0:00:30 elapsed, 0:00:30 left\nround 20/20  1:00:30 elapsed, 0:00:00 left\n"
    )


def test_several_rounds_in_one_step(clock):
    stream = io.StringIO()
    with Progress(30, stream=stream) as progress:
        for rounds in (10, 20):
            clock[0] += 20
            progress.update(rounds)
    assert "round 10/30  0:00:20 elapsed, 0:00:40 left" in stream.getvalue()
    assert "round 20/30  0:00:40 elapsed, 0:00:20 left" in stream.getvalue()


def test_standard_error_by_default(capsys):
    with Progress(1) as progress:
        progress.update(1)
    assert capsys.readouterr().err.startswith("round 1/1 ")


def on_terminal(code, width):
    """What a program writes to a pseudo-terminal."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, width))
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=follower)
    os.close(follower)
    shown = b""
    while True:
        try:
            block = os.read(leader, 4096)
        except OSError:  # Linux says so when the other side is closed
            break
        if not block:
            break
        shown += block
    os.close(leader)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize("width", [100, 0])
def test_a_bar_on_a_terminal(width):
    shown = on_terminal(
        """
        from fedjax_hk.run.terminal import Progress
        with Progress(4, done=1) as progress:
            progress.update(2, "loss 0.5")
            progress.say("a line")
            progress.update(4, "loss 0.4")
        """,
        width,
    )
    states = re.findall(r"(\d+)%\|.{20}\| round (\d)/4  ([^\r\n]*)", shown)
    assert [(percent, done) for percent, done, _ in states] == [
        ("25", "1"),
        ("50", "2"),
        ("50", "2"),
        ("100", "4"),
        ("100", "4"),
    ]
    # Not the digits: they are as fast as the machine.
    assert re.fullmatch(r"\d:\d\d:\d\d elapsed, \d:\d\d:\d\d left  loss 0.5", states[1][2].rstrip())
    assert re.search(r"\r *\ra line\r\n", shown)  # the bar is wiped before, drawn again after
    assert shown.endswith("\n")


# Requests to stop.

LOOP = """
    import signal, sys, time
    from fedjax_hk.run.terminal import StopRequest, exit_code
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with StopRequest() as stop:
        for round_number in range(100):
            print("in round", flush=True)
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                time.sleep(0.01)
            print("saved", flush=True)
            if stop.requested:
                break
    print(stop.requested, flush=True)
    assert [signal.getsignal(number) for number in numbers] == before
    sys.exit(exit_code(stop.requested))
"""


def start_loop():
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOOP)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "in round\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_round_ends_and_is_saved(name):
    process = start_loop()
    process.send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=20)
    assert out == f"saved\n{name}\n"
    assert f"{name}: this round ends and is saved" in err
    assert process.returncode == 128 + signal.Signals[name]


def test_the_second_interrupt_stops_at_once():
    process = start_loop()
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n"
    assert "Ctrl-C again stops at once" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in err
    assert "SIGINT" not in out
    assert process.returncode == -signal.SIGINT


def test_no_signal_no_request():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGINT) is not before
    assert (stop.requested, exit_code(stop.requested)) == ("", 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_nothing_is_done():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, "")]


# Tables.


def test_table_is_aligned():
    rows = [["fedavg", 68.04321, 1, None], ["naïve, 7-day mean", 168.7, 12, "3.5%"]]
    assert format_table(rows, ["forecast", "MAE (L)", "n", "gain"]).split("\n") == [
        "forecast           MAE (L)   n  gain",
        "-----------------  -------  --  ----",
        "fedavg               68.04   1     -",
        "naïve, 7-day mean    168.7  12  3.5%",
    ]


def test_table_without_rows_and_with_a_short_one():
    assert format_table([], ["a", "bc"]) == "a  bc\n-  --"
    with pytest.raises(ValueError, match=r"Expected rows of 2 cells, got 1: \[3\]"):
        format_table([[3]], ["a", "b"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (-1, "0:00:00"), (360000, "100:00:00")],
)
def test_seconds(seconds, text):
    assert terminal.format_seconds(seconds) == text
