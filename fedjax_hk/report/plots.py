"""Pictures of a run, drawn from the numbers of `numbers.py`.

Everything is as wide as a phone's screen, so that text keeps its size there. Colors are
those of Okabe and Ito (2008), which color-blind people can tell apart; each line differs in
its dashes or markers too. Text and axes have one color, `INK`, which the report replaces by
the page's own, so that pictures are right in light and dark.
"""

from __future__ import annotations

import functools
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fedjax_hk.report.coalition_map import CoalitionMap
from fedjax_hk.report.numbers import Dissimilarity, Together, Trajectory
from fedjax_hk.store.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

INK = "#1c2733"
MODEL, NAIVE = "#0072B2", "#D55E00"  # blue, vermilion
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
REST = "#8a939c"  # further coalitions
_DASHES = ((4, 2), (1, 1.5), (6, 2, 1, 2), (2, 1))
_MARKERS = "os^Dv*"
WIDTH = 5.0  # inches: 360 points, the width of a phone
NAMES_SHOWN = 30  # more names than this on one axis cannot be read

_STYLE: dict[RcKeyType, Any] = {
    "font.size": 11, "axes.titlesize": 11, "axes.titleweight": "bold", "legend.fontsize": 10,
    "axes.titlelocation": "left", "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK,
    "grid.alpha": 0.15, "lines.linewidth": 1.8, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "svg.fonttype": "none",
    "axes.formatter.use_mathtext": False, "axes.unicode_minus": True, "image.cmap": "cividis",
    "axes.formatter.useoffset": False,
}  # fmt: skip


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Draws in the style of all pictures."""

    @functools.wraps(draw)
    def in_style(*args, **options):
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            # Names may hold letters that the font lacks; a box is drawn in their place.
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            return draw(*args, **options)

    return in_style


def plain(text: Any, longest: int = 24) -> str:
    """A name from a file as one short line that is not taken for a formula."""
    text = re.sub(r"[\x00-\x1f\x7f]", "·", str(text))
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return text.replace("$", r"\$")


def _label(text: str) -> str:
    """A longer name in up to two lines."""
    return textwrap.fill(plain(text, 84), 44, break_on_hyphens=False)


@styled
def to_png(figure: Figure) -> bytes:
    """On white, whatever the viewer's background."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


@styled
def to_svg(figure: Figure, name: str) -> str:
    """The same bytes for the same figure; identifiers begin with `name`, so that several
    pictures can stand in one page."""
    buffer = io.StringIO()
    figure.draw_without_rendering()  # the layout makes room for labels from the second time on
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r' id="', f' id="{name}-', buffer.getvalue())
    return re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)


def write(folder: RunFolder, name: str, figure: Figure, svg: str) -> None:
    """`pictures/<name>.svg` and `.png`, both on white."""
    on_white = svg.replace("<svg ", '<svg style="background:#fff" ', 1)
    folder.write_bytes(f"pictures/{name}.svg", on_white.encode())
    folder.write_bytes(f"pictures/{name}.png", to_png(figure))


def _figure(height: float, rows: int = 1, **options) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, 1, squeeze=False, **options)[:, 0])


def _legend_below(axes, columns: int = 1) -> None:
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.02, -0.22), ncols=columns, borderaxespad=0,
        handlelength=2.6,
    )  # fmt: skip


def coalition_colors(labels_s: np.ndarray) -> dict[int, tuple[str, str]]:
    """Color and words for every coalition: the largest get colors of their own."""
    names, counts = np.unique(labels_s, return_counts=True)
    found, rank = {}, 0
    for i in np.argsort(-counts, kind="stable"):
        if counts[i] == 1:
            found[int(names[i])] = (INK, "alone")
        elif rank < len(PALETTE):
            found[int(names[i])] = (PALETTE[rank], f"coalition of {counts[i]}")
            rank += 1
        else:
            found[int(names[i])] = (REST, "smaller coalitions")
    return found


@styled
def trajectories(moved: Trajectory) -> Figure:
    """The paper's Fig. 3: first main axis over the steps, and the plane of the first two."""
    figure, (over, plane) = _figure(7.2, 2, height_ratios=(1, 1.1))
    steps = np.arange(len(moved.positions_tsa))
    said = set()
    for label, (color, words) in coalition_colors(moved.labels_s).items():
        paths_tsa = moved.positions_tsa[:, moved.labels_s == label]
        alone = words == "alone"
        style: dict[str, Any] = {"color": color, "lw": 1.0, "alpha": 0.55 if alone else 0.8}
        rasterized = moved.positions_tsa.shape[1] > 150
        lines = [np.column_stack([steps, path[:, 0]]) for path in paths_tsa.swapaxes(0, 1)]
        over.add_collection(LineCollection(lines, rasterized=rasterized, **style))
        plane.add_collection(
            LineCollection(list(paths_tsa.swapaxes(0, 1)), rasterized=rasterized, **style)
        )
        plane.scatter(*paths_tsa[0].T, s=10, color=color, lw=0, rasterized=rasterized)
        end = paths_tsa[-1]
        plane.scatter(*end.T, s=60, marker="x" if not alone else ".", color=color,
                      label=None if words in said else words)  # fmt: skip
        said.add(words)
    over.autoscale()
    over.margins(x=0.02)
    over.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    share = [f"{100 * one:.0f} %" for one in moved.share_a]
    over.set(title="Opinions over the inner steps", xlabel="inner step",
             ylabel=f"main axis 1 ({share[0]})")  # fmt: skip
    plane.autoscale()
    plane.set(title="From start (dot) to rest (cross)", xlabel=f"main axis 1 ({share[0]})",
              ylabel=f"main axis 2 ({share[1]})")  # fmt: skip
    _legend_below(plane, 2)
    return figure


@styled
def over_rounds(
    rounds: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    levels: Mapping[str, float],
    ylabel: str,
) -> Figure:
    """The paper's Figs. 4 and 5: lines over the rounds, and levels that do not change."""
    figure, (axes,) = _figure(3.6 + 0.22 * sum(1 + (len(name) > 44) for name in (*lines, *levels)))
    marked = len(rounds) <= 30
    for i, (name, values) in enumerate(lines.items()):
        dashes = (None, None) if i < len(PALETTE) else _DASHES[i % len(_DASHES)]
        marker = _MARKERS[i % len(_MARKERS)] if marked else None
        axes.plot(rounds, values, color=PALETTE[i % len(PALETTE)], dashes=dashes, ms=4,
                  marker=marker, label=_label(name))  # fmt: skip
    for i, (name, level) in enumerate(levels.items()):
        axes.axhline(level, color=NAIVE if i == 0 else INK, dashes=_DASHES[i % len(_DASHES)],
                     lw=1.4, alpha=1 if i == 0 else 0.7, label=_label(name))  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="round", ylabel=ylabel)
    _legend_below(axes)
    return figure


@styled
def forecasts(panels: Sequence[tuple[str, pd.DataFrame]], naive: str | None, unit: str) -> Figure:
    """The paper's Fig. 7: actual against forecast.

    Args:
      panels: title and rows of `numbers.last_forecasts` of each client.
      naive: column of the naive forecast to show, and its name in words.
    """
    figure, rows = _figure(2.5 * len(panels) + 0.6, len(panels))
    for axes, (title, mine) in zip(rows, panels, strict=True):
        axes.plot(mine.index, mine["actual"], color=INK, lw=1.2, marker=".", ms=3, label="actual")
        if naive:
            axes.plot(mine.index, mine[naive], color=NAIVE, dashes=(2, 1.5), lw=1.2,
                      label="best naive forecast")  # fmt: skip
        axes.plot(mine.index, mine["forecast"], color=MODEL, lw=2, label="model")
        locator = AutoDateLocator(minticks=3, maxticks=6)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.margins(x=0.01)
        axes.set_title(plain(title, 52), fontsize=10.5)
        axes.set_ylabel(plain(unit))
    rows[-1].legend(loc="upper left", bbox_to_anchor=(-0.02, -0.28), ncols=3, borderaxespad=0,
                    columnspacing=1.2, handlelength=2)  # fmt: skip
    return figure


def _tau_text(limit: float, _=None) -> str:
    """tau of a limit of 1 - cos that has one digit."""
    digits = max(0, int(np.ceil(-np.log10(limit) - 1e-9)))
    return f"{1 - limit:.{digits}f}".replace("-", "\N{MINUS SIGN}")


# In the order of the legend, whatever each map shows.
_MAP_NAMES = (
    "largest", "2nd and 3rd", "smaller ones", "alone", "number of coalitions", "this run's tau",
)  # fmt: skip


@styled
def coalition_maps(
    maps: Mapping[str, CoalitionMap], used: Mapping[str, float], titles: Mapping[str, str]
) -> Figure:
    """Sizes of the coalitions over tau, for each opinion space.

    Args:
      used: the run's own limit of 1 - cos, by opinion space.
    """
    figure, rows = _figure(2.6 * len(maps) + 0.5, len(maps))
    for axes, (space, found) in zip(rows, maps.items(), strict=True):
        limits, sizes_ts = found.limits_t, found.sizes_ts.astype(float)
        multi_ts = np.where(sizes_ts > 1, sizes_ts, 0)
        sizes = (
            multi_ts[:, 0],
            multi_ts[:, 1:3].sum(axis=1),
            multi_ts[:, 3:].sum(axis=1),
            (sizes_ts == 1).sum(axis=1),
        )
        colors = (PALETTE[0], PALETTE[1], PALETTE[4], REST)
        bands = [band for band in zip(_MAP_NAMES, sizes, colors, strict=False) if band[1].any()]
        axes.stackplot(limits, [b[1] for b in bands], labels=[b[0] for b in bands],
                       colors=[b[2] for b in bands], step="post", lw=0, alpha=0.8)  # fmt: skip
        axes.step(limits, found.num_coalitions_t, where="post", color=INK, lw=2,
                  label=_MAP_NAMES[4])  # fmt: skip
        if space in used:
            axes.axvline(used[space], color="white", lw=4)
            axes.axvline(used[space], color=NAIVE, dashes=(3, 2), lw=2, label=_MAP_NAMES[5])
        axes.set_xscale("log")
        low = min(limits[0], used.get(space, limits[0]))
        axes.set_xlim(2.0, low)  # to the right, tau grows
        _set_ticks(axes.xaxis, _tau_ticks(low), _tau_text)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set(title=titles[space], ylabel="clients", ylim=(0, sizes_ts.sum(axis=1).max()))
    rows[-1].set_xlabel("tau: smallest cosine of neighbors")
    handles: dict[str, Any] = {}
    for axes in rows:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    named = [name for name in _MAP_NAMES if name in handles]
    rows[-1].legend([handles[name] for name in named], named, loc="upper left", ncols=2,
                    borderaxespad=0, bbox_to_anchor=(-0.02, -0.34))  # fmt: skip
    return figure


def _tau_ticks(low: float) -> list[float]:
    """Limits of 1 - cos to be labelled on a log axis from 2 to `low`: powers of ten first,
    then what there is room for, as near 1 a tau has many digits."""
    decades = 10.0 ** -np.arange(1, np.ceil(-np.log10(low)) + 1)
    kept: list[float] = []
    width = np.log10(2 / low)
    for tick in (2.0, 1.0, *decades, *(0.5 * decades * 10), *(0.2 * decades * 10)):
        room = [0.05 + 0.011 * (len(_tau_text(tick)) + len(_tau_text(one))) for one in kept]
        gaps = [abs(np.log10(one / tick)) / width for one in kept]
        if tick >= low and all(gap >= least for gap, least in zip(gaps, room, strict=True)):
            kept.append(float(tick))
    return kept


@styled
def dissimilarity(found: Dissimilarity, limit: float, measure: str, grouped: bool) -> Figure:
    """Dissimilarities of all pairs, ordered by coalition, and their histogram."""
    figure, (matrix, histogram) = _figure(7.6, 2, height_ratios=(1.6, 1))
    size = len(found.names)
    pairs = found.pairs[found.pairs > 0]
    wide = len(pairs) > 0 and pairs.max() > 30 * pairs.min()
    norm = None
    if wide:
        norm = LogNorm(np.quantile(pairs, 0.01), pairs.max())
    shown_ss = np.where(np.eye(size, dtype=bool), np.nan, found.apart_ss)
    image = matrix.imshow(shown_ss, norm=norm, cmap="cividis_r", interpolation="nearest")
    figure.colorbar(image, ax=matrix, label=measure, shrink=0.85)
    borders = np.cumsum([one for one in found.sizes if one > 1])
    if grouped:
        for border in borders[borders < size]:
            matrix.axhline(border - 0.5, color="white", lw=1)
            matrix.axvline(border - 0.5, color="white", lw=1)
    matrix.set_title("Pairs, ordered by coalition" if grouped else "Pairs of clients")
    _name_axes(matrix, found.names)

    bins: int | np.ndarray = 40
    if wide:
        low, high = pairs.min(), pairs.max()
        if np.isfinite(limit) and limit > 0:
            low, high = min(low, limit * 0.8), max(high, limit * 1.25)
        histogram.set_xscale("log")
        _set_ticks(histogram.xaxis, _log_ticks(low, high))
        bins = np.geomspace(low, high, 40)
    histogram.hist(pairs if wide else found.pairs, bins=bins, color=MODEL, alpha=0.85)
    if np.isfinite(limit):
        histogram.axvline(limit, color=NAIVE, dashes=(3, 2), lw=2)
        share = np.mean(found.pairs <= limit)
        histogram.set_title(f"Threshold {limit:.3g}: {100 * share:.3g} % of the pairs within it",
                            fontsize=10.5)  # fmt: skip
    else:
        histogram.set_title("All pairs")
    histogram.set(xlabel=measure, ylabel="pairs")
    histogram.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _set_ticks(axis, ticks: Sequence[float], text=lambda value, _: f"{value:g}") -> None:
    """These ticks and no others, whatever the scale of the axis."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(text))
    axis.set_minor_locator(NullLocator())


def _log_ticks(low: float, high: float) -> list[float]:
    """Up to six labelled values on a log axis: powers of ten, or 1, 2, 5 times them where these
    are few."""
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for steps in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = [step * 10.0**power for power in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 6:
            return ticks
    return ticks[:: -(-len(ticks) // 6)]


def _name_axes(axes, names: Sequence[str]) -> None:
    axes.grid(False)
    axes.set_xticks([])
    if len(names) <= NAMES_SHOWN:
        axes.set_yticks(range(len(names)), [plain(name, 12) for name in names], fontsize=7.5)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(names)} clients")


@styled
def together(found: Together) -> Figure:
    """Share of joint rounds that each pair spent in one coalition."""
    figure, (axes,) = _figure(4.6)
    axes.set_facecolor(REST)  # pairs that never met
    image = axes.imshow(found.share_nn, vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of joint rounds", shrink=0.85)
    _name_axes(axes, found.names)
    return figure


@styled
def errors_against_naive(
    naive_n: np.ndarray,
    model_n: np.ndarray,
    alone_n: np.ndarray,
    name: str,
    label: str,
    most: float = np.inf,
) -> Figure:
    """Each client's error beside one that needs no model; on the line both are equal.

    Args:
      name, label: of what needs no model, and of the errors.
      most: the largest value that there can be.
    """
    figure, (axes,) = _figure(5.2)
    both = np.concatenate([naive_n, model_n])
    positive = both[both > 0]
    high = positive.max() if len(positive) else 1.0
    many = len(naive_n) > 300
    for side, color, marker, who in (
        (~alone_n, MODEL, "o", "clients"),
        (alone_n, NAIVE, "^", "mostly alone"),
    ):
        if side.any():
            axes.scatter(naive_n[side], model_n[side], s=12 if many else 28, color=color,
                         marker=marker, alpha=0.65, lw=0, label=who, rasterized=many)  # fmt: skip
    if np.isfinite(most):
        ends = most * np.array([-0.03, 1.03])
    elif len(positive) and high > 5 * np.median(positive):
        # A few large errors would push all others into a corner; of small ones, some are 0.
        ends = np.array([0, high * 1.2])
        linear = np.quantile(positive, 0.1)
        for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
            scale("symlog", linthresh=linear, linscale=0.5)
            _set_ticks(axis, [0, *_log_ticks(linear, high)])
    else:
        ends = np.array([0, high * 1.05])
    axes.plot(ends, ends, color=INK, lw=1, dashes=(4, 2), label="equal")
    axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel=f"{plain(label)}: {name}",
             ylabel=f"{plain(label)}: model")  # fmt: skip
    _legend_below(axes, 3)  # inside it would hide clients, of one task or the other
    return figure


@styled
def label_counts(counts_nc: np.ndarray, clients: Sequence[str], classes: Sequence[str]) -> Figure:
    """Clients by classes: the darker, the more training samples; none is left open."""
    num_clients, num_classes = counts_nc.shape
    figure, (axes,) = _figure(1.6 + min(0.21 * num_clients, 9))
    shown = np.ma.masked_equal(counts_nc, 0)
    image = axes.imshow(
        shown, cmap="cividis_r", vmin=0, aspect="auto", interpolation="nearest",
        rasterized=counts_nc.size > 2000,
    )  # fmt: skip
    figure.colorbar(image, ax=axes, label="training samples").locator = MaxNLocator(
        integer=True, nbins=6
    )
    axes.grid(False)
    axes.set(xlabel="class", ylabel="client")
    for axis, names, most in ((axes.xaxis, classes, 15), (axes.yaxis, clients, 40)):
        places = range(0, len(names), -(-len(names) // most))
        axis.set_ticks(list(places), [plain(names[place], 10) for place in places])
        axis.set_tick_params(labelsize=8)
    if num_classes <= 12 and num_clients <= 40:  # more numbers could not be read
        half = counts_nc.max() / 2
        for (row, column), count in np.ndenumerate(counts_nc):
            if count:
                color = "white" if count > half else "black"
                axes.text(column, row, count, ha="center", va="center", size=7, color=color)
    return figure


@styled
def methods(
    names: Sequence[str], means: Sequence[float], clients_std: Sequence[float],
    seeds_std: Sequence[float], level: tuple[str, float] | None, label: str,
) -> Figure:  # fmt: skip
    """The paper's Fig. 6: error by method, with its spread over clients and over seeds."""
    figure, (axes,) = _figure(1.9 + 0.95 * len(names))
    place = np.arange(len(names))[::-1]
    axes.barh(place, means, height=0.4, color=MODEL, alpha=0.8)
    axes.errorbar(means, place + 0.08, xerr=clients_std, fmt="none", ecolor=INK, lw=1.2, capsize=4,
                  label="std over clients")  # fmt: skip
    if np.isfinite(seeds_std).any():
        axes.errorbar(means, place - 0.08, xerr=seeds_std, fmt="none", ecolor=NAIVE, lw=2.4,
                      capsize=4, label="std over seeds")  # fmt: skip
    if level:
        # Beside the bars alone: through the names it would strike them out.
        axes.vlines(np.full(len(names), level[1]), place - 0.3, place + 0.26, color=NAIVE,
                    linestyles="dashed", lw=1.8, label=_label(level[0]))  # fmt: skip
    # Names stand above their bars: beside them they would take half of a phone's width.
    for y, name, mean in zip(place, names, means, strict=True):
        axes.text(0, y + 0.28, _label(f"{name}: {mean:.4g}"), va="bottom", fontsize=10)
    axes.set(xlabel=plain(label), ylim=(-0.6, len(names) - 0.2), yticks=[])
    axes.set_xlim(0, None)
    _legend_below(axes)
    return figure


@styled
def intervals(
    names: Sequence[str], found: Sequence[Any], base: str, label: str, sign: int = 1
) -> Figure:
    """Mean paired differences with their intervals.

    Args:
      sign: -1 where more is better, to the right of the line; else 1.
    """
    figure, (axes,) = _figure(1.4 + 0.8 * len(names))
    for y, name, one in zip(range(len(names))[::-1], names, found, strict=True):
        color = INK
        if one.low > 0 or one.high < 0:
            color = MODEL if sign * one.mean < 0 else NAIVE
        if np.isfinite(one.low):
            axes.plot([one.low, one.high], [y, y], color=color, lw=2.5)
        axes.plot([one.mean], [y], color=color, marker="o", ms=7)
        axes.annotate(_label(name), (0, y), xycoords=("axes fraction", "data"),
                      xytext=(0, 7), textcoords="offset points", fontsize=10)  # fmt: skip
    axes.axvline(0, color=INK, lw=1, dashes=(4, 2))
    axes.margins(x=0.12)
    axes.set(yticks=[], ylim=(-0.5, len(names) - 0.3),
             xlabel=f"{plain(label)} minus that of {plain(base, 30)}")  # fmt: skip
    return figure
