"""The picture of `attacks.py`, in the look of the report's pictures."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from fedjax_hk.report import plots
from fedjax_hk.report.plots import INK, NAIVE, PALETTE, REST

ATTACKS = {  # marker, its color and its edge's
    "none": ("o", "white", INK),
    "sign_flip": ("s", PALETTE[0], PALETTE[0]),
    "scale": ("^", PALETTE[1], PALETTE[1]),
    "noise": ("D", PALETTE[2], PALETTE[2]),
}
SEATS = {  # words, color, color of text on it
    "mixed": ("with honest clients", PALETTE[5], "white"),
    "together": ("with attackers only", PALETTE[4], "black"),
    "alone": ("alone", REST, "black"),
}


def write(path: str, rows: dict[str, dict[str, Any]], naive: dict[str, float]) -> None:
    """Draws `Figures` by method and attack as a PNG, beside the best naive forecast's error."""
    png = plots.to_png(draw(rows, naive))
    with open(path, "wb") as file:
        file.write(png)


@plots.styled
def draw(rows: dict[str, dict[str, Any]], naive: dict[str, float]) -> Figure:
    """Honest clients' errors by method and attack, and beside them where attackers sat."""
    figure = Figure(figsize=(10, 1.6 + 0.85 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    errors, seats = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1))
    for place, by_attack in enumerate(rows.values()):
        for line, attack in enumerate(ATTACKS):
            if attack in by_attack:
                y = place + 0.2 * (line - 1.5)
                _errors(errors, y, attack, by_attack[attack].errors)
                _seats(seats, y, attack, by_attack[attack])
        if "none" in by_attack:
            level = _mean(by_attack["none"].errors)
            errors.vlines(level, place - 0.4, place + 0.4, color=INK, lw=1, alpha=0.6)
        if all(math.isnan(of.mixed) for of in by_attack.values()):
            seats.text(0.5, place, "no coalitions", ha="center", va="center", alpha=0.6)
    for axes in (errors, seats):
        axes.grid(False, axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        for place in range(1, len(rows)):
            axes.axhline(place - 0.5, color=INK, lw=0.6, alpha=0.25)
    _finish_errors(errors, list(rows), naive)
    _finish_seats(seats)
    return figure


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _marker(attack: str) -> dict[str, Any]:
    marker, color, edge = ATTACKS[attack]
    return {"marker": marker, "color": color, "mec": edge, "mew": 1.4, "ms": 6.5, "ls": "none"}


def _errors(axes, y: float, attack: str, errors: list[float]) -> None:
    """Mean over seeds, and a line from the best seed to the worst."""
    axes.plot([min(errors), max(errors)], [y, y], color=ATTACKS[attack][2], lw=1.4)
    axes.plot(_mean(errors), y, **_marker(attack))


def _seats(axes, y: float, attack: str, of: Any) -> None:
    """One bar of the shares, and the attack's marker before it."""
    if math.isnan(of.mixed):
        return
    left = 0.0
    for key, (_, color, ink) in SEATS.items():
        share = getattr(of, key)
        axes.barh(y, share, 0.17, left=left, color=color, lw=0)
        if share > 0.08:  # else there is no room
            at = (left + share / 2, y)
            axes.text(*at, f"{100 * share:.0f} %", color=ink, size=7.5, ha="center", va="center")
        left += share
    axes.plot(-0.04, y, **_marker(attack) | {"ms": 5}, clip_on=False)


def _finish_errors(axes, names: list[str], naive: dict[str, float]) -> None:
    for attack in ATTACKS:
        label = "no attack, and its level" if attack == "none" else attack
        axes.plot([], [], **_marker(attack), label=label)
    if naive:
        best = min(naive, key=naive.get)
        axes.axvline(naive[best], color=NAIVE, dashes=(4, 2), lw=1.4, label=f"naive: {best}")
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    digits = (1, 3) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
    axes.xaxis.set_major_locator(
        FixedLocator([d * 10**p for p in range(-3, 9) for d in digits if low <= d * 10**p <= high])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_yticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5), xlabel="MAE of honest clients, L (log)",
             title="Error of honest clients")  # fmt: skip
    axes.figure.legend(loc="outside lower left", ncols=3)


def _finish_seats(axes) -> None:
    axes.set(xlim=(-0.07, 1), xlabel="attackers (without attack: the same clients)",
             title="Where attackers sat")  # fmt: skip
    axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    handles = [Patch(color=color, label=words) for words, color, _ in SEATS.values()]
    axes.figure.legend(handles=handles, loc="outside lower right", ncols=2)
