"""What a run shows while it goes on, and how it is asked to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, TextIO


class Progress:
    """Rounds done and time left: a bar on a terminal, else one plain line a round.

    A context manager. The time left is judged by the rounds of this process alone, and
    without its first one as soon as there is another: that one compiles.

    Args:
      total: rounds of the run.
      done: rounds behind it already, after a resume.
      stream: where to; standard error if None.
    """

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None):
        self._total = total
        self._done = done
        self._stream = sys.stderr if stream is None else stream
        self._bar = None
        self._start = time.monotonic()
        self._first: tuple[int, float] | None = None  # round and time of the first update

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if self._stream.isatty():
            self._bar = _make_bar(self._total, self._done, self._stream)
        return self

    def __exit__(self, *exc_info) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def update(self, round_number: int, text: str = "") -> None:
        """Says that `round_number` rounds are done, with `text` about the last one."""
        now = time.monotonic()
        left = self._seconds_left(round_number, now)
        if self._first is None:
            self._first = (round_number, now)
        times = f"{format_seconds(now - self._start)} elapsed, {format_seconds(left)} left"
        if self._bar is None:
            self._print(f"round {round_number}/{self._total}  {times}  {text}".rstrip())
            return
        self._bar.set_description_str(f"{times}  {text}".rstrip(), refresh=False)
        self._bar.n = round_number
        self._bar.refresh()

    def say(self, text: str) -> None:
        """Prints a line; a bar moves below it."""
        if self._bar is None:
            self._print(text)
            return
        self._bar.clear()
        self._print(text)
        self._bar.refresh()

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _seconds_left(self, round_number: int, now: float) -> float:
        since, at = self._done, self._start
        if self._first is not None and round_number > self._first[0]:
            since, at = self._first
        return (now - at) / max(round_number - since, 1) * max(self._total - round_number, 0)


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a flag, so that a round can end and be saved.

    A context manager; the second Ctrl-C raises KeyboardInterrupt at once. The handlers of
    before come back at the end. Outside the main thread, where Python takes no signals,
    it does nothing.

    Args:
      then: what happens before the end, for the message.

    Attributes:
      requested: name of the first signal, such as "SIGTERM"; "" if none came.
    """

    def __init__(self, then: str = "this round ends and is saved") -> None:
        self.requested = ""
        self._then = then
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not set from Python, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if not self.requested:
            self.requested = signal.Signals(number).name
            again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
            # os.write: print may not be entered again while it is interrupted by a signal.
            os.write(2, f"\n{self.requested}: {self._then}{again}\n".encode())


def exit_code(name: str) -> int:
    """What shells expect of a process ended by the signal of that name, 128 + number; 0 if ""."""
    return 128 + signal.Signals[name] if name else 0


def format_seconds(seconds: float) -> str:
    """Hours, minutes and seconds, as 0:00:12."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def _make_bar(total: int, done: int, stream: TextIO):
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no watching thread: the bar is drawn at each round's end

    # Some pseudo-terminals are 0 wide, where tqdm would trim the bar to nothing.
    try:
        wide = os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # notebooks say they are terminals, but have no size
        wide = False
    # tqdm's own estimate is not shown; the plain lines and the bar shall say the same.
    return Bar(
        total=total,
        initial=done,
        file=stream,
        ncols=None if wide else 80,
        dynamic_ncols=wide,
        bar_format="{percentage:3.0f}%|{bar:20}| round {n_fmt}/{total_fmt}  {desc}",
    )
