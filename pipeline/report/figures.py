"""The figures of a selection, drawn from counts: as fast for a million documents as for a hundred.

Matplotlib's object API and the Agg canvas only; the same counts give the same bytes.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.audit.score_shards import ScoreHistogram
from pipeline.audit.summary import Summary
from pipeline.report.facts import RankHistogram, SelectionFacts
from pipeline.report.wording import documents, null_share, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, INK = "#0072B2", "#D55E00", "#009E73", "#333333"  # Okabe & Ito: told apart by every eye
ROLE_STYLES = {"audit": (BLUE, "-", 0.18), "unseen": (ORANGE, "--", 0.0), "seen": (GREEN, "-.", 0.0)}
ROLE_LABELS = {"audit": "audited", "unseen": "known unseen", "seen": "known seen"}
MAX_POINTS = 2000
P_BINS = 20
TAIL = 0.001
SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.usetex": False,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "path.simplify": True,
}


@dataclass(frozen=True, slots=True)
class FigureImage:
    """A figure: its file name, what it shows in words, and the PNG."""

    file: str
    title: str
    alt: str
    caption: str
    png: bytes


def draw_figures(selection: SelectionFacts) -> list[FigureImage]:
    """The figures of a selection for which the run directory holds the counts."""
    figures = []
    if selection.scores is not None and _drawable(selection.scores):
        figures.append(_score_figure(selection, selection.scores))
    if selection.ranks is not None:
        figures.append(_p_value_figure(selection, selection.ranks))
        if selection.summary.procedure != "ktd":  # which decides on W, not on p-values
            figures.append(_step_up_figure(selection, selection.ranks))
    return figures


def _render(paint: Callable[[Axes], None]) -> bytes:
    import matplotlib  # costs a second, and nothing but a page needs it
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(5.4, 3.7), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        paint(axes)
        figure.legend(loc="outside upper left", alignment="left", ncols=1)
        buffer = io.BytesIO()
        faster = {"compress_type": zlib.Z_FILTERED}  # and no larger
        figure.savefig(buffer, format="png", dpi=180, metadata={"Software": None}, pil_kwargs=faster)
    return buffer.getvalue()


def _count_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


# --- scores


def _score_figure(selection: SelectionFacts, scores: ScoreHistogram) -> FigureImage:
    edges, roles = _bins(scores)
    totals = {role: sum(scores.roles[role]) for role in roles}

    def paint(axes: Axes) -> None:
        for role, counts in roles.items():
            colour, line, fill = ROLE_STYLES.get(role, (INK, ":", 0.0))
            height = counts / (totals[role] * np.diff(edges))
            label = f"{ROLE_LABELS.get(role, role)} ({totals[role]:,})"
            axes.stairs(height, edges, color=colour, linestyle=line, linewidth=1.8, label=label)
            if fill:
                axes.stairs(height, edges, color=colour, alpha=fill, fill=True)
        axes.set_xlabel(f"score: {scores.column} (higher: more member-like)")
        axes.set_ylabel("share of the role per unit of score")
        axes.set_ylim(bottom=0)

    sizes = ", ".join(f"{ROLE_LABELS.get(role, role)}: {documents(total)}" for role, total in totals.items())
    outside = sum(total - int(roles[role].sum()) for role, total in totals.items())
    hidden = f" {documents(outside)} with extreme scores lie outside the drawn range." if outside else ""
    return FigureImage(
        file=f"{selection.name}-scores.png",
        title="Scores by role",
        alt=f"Distribution of the score {scores.column} by role; {sizes}.",
        caption=f"Each curve encloses an area of one, so roles of different sizes can be compared.{hidden}",
        png=_render(paint),
    )


def _drawable(scores: ScoreHistogram) -> bool:
    """Whether there is a score and every bin has a width."""
    return any(map(sum, scores.roles.values())) and bool(np.all(np.diff(scores.edges) > 0))


def _bins(scores: ScoreHistogram) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Neighbouring bins joined until the curves are readable, without the outermost tails."""
    roles = {role: np.array(counts) for role, counts in scores.roles.items() if sum(counts) > 0}
    edges = np.array(scores.edges)
    shares = [np.cumsum(counts) / counts.sum() for counts in roles.values()]
    low = min(int(np.searchsorted(share, TAIL, side="right")) for share in shares)
    high = max(int(np.searchsorted(share, 1 - TAIL, side="left")) for share in shares) + 1
    smallest = min(int(counts.sum()) for counts in roles.values())
    wanted = int(np.clip(2 * smallest ** (1 / 3), 8, 60))
    step = -(-(high - low) // wanted)
    starts = np.arange(low, high, step)
    joined = {role: np.add.reduceat(counts[:high], starts) for role, counts in roles.items()}
    return np.append(edges[starts], edges[high]), joined


# --- p-values


def _p_value_figure(selection: SelectionFacts, ranks: RankHistogram) -> FigureImage:
    n, m = selection.summary.n_calibration, int(ranks.count.sum())
    pi0, estimated = null_share(selection.summary)
    cuts = np.unique(np.round(np.linspace(0, n + 1, min(P_BINS, n + 1) + 1)).astype(np.int64))
    reached = np.concatenate(([0], np.cumsum(ranks.count)))
    counts = np.diff(reached[np.searchsorted(ranks.rank, cuts, side="right")])
    edges = cuts / (n + 1)
    label = f"null share {'estimated as' if estimated else 'taken as'} {pi0:.3g}"

    def paint(axes: Axes) -> None:
        axes.stairs(counts / (m * np.diff(edges)), edges, fill=True, color=BLUE, alpha=0.35)
        axes.stairs(counts / (m * np.diff(edges)), edges, color=BLUE, linewidth=1.2, label=f"audited ({m:,})")
        axes.axhline(pi0, color=ORANGE, linestyle="--", linewidth=1.8, label=label)
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("p-value")
        axes.set_ylabel("density (1 = uniform)")

    return FigureImage(
        file=f"{selection.name}-p-values.png",
        title="p-values of the audited documents",
        alt=f"Histogram of {m:,} p-values; {label}, drawn as a level line.",
        caption=(
            "Documents that are just like the calibration documents spread evenly from 0 to 1; the dashed line is "
            f"their share, {'estimated by the procedure' if estimated else 'which this procedure takes to be all'}. "
            "Documents that could not be scored stand at p = 1."
        ),
        png=_render(paint),
    )


# --- the step-up decision


def _slope(summary: Summary, m: int) -> float | None:
    """Documents per unit of p on the line that the curve must reach; None if the procedure has no such line."""
    return None if summary.factor is None else summary.factor * m / summary.alpha


def _step_up_figure(selection: SelectionFacts, ranks: RankHistogram) -> FigureImage:
    n, m = selection.summary.n_calibration, int(ranks.count.sum())
    threshold, slope = selection.summary.threshold, _slope(selection.summary, m)
    p, reached = ranks.rank / (n + 1), np.cumsum(ranks.count)
    right = _right_edge(threshold, slope, m, n)
    x, y = _thinned(p, reached, right, threshold)

    def paint(axes: Axes) -> None:
        axes.step(x, y, where="post", color=BLUE, linewidth=1.8, label="audited documents")
        if slope is not None:
            label = f"line to reach (alpha = {percent(selection.summary.alpha)})"
            axes.plot([0, right], [0, slope * right], color=ORANGE, linestyle="--", linewidth=1.8, label=label)
        if threshold is not None:
            label = f"threshold p = {threshold:.3g}: {selection.summary.n_selected:,} selected"
            axes.axvline(threshold, color=INK, linestyle=":", linewidth=1.5, label=label)
        top = max(float(y.max()), 0.0 if slope is None else min(slope * right, 1.6 * float(y.max())), 1.0)
        axes.set_xlim(0, right)
        axes.set_ylim(0, 1.05 * top)
        axes.set_xlabel("p-value")
        axes.set_ylabel("audited documents at or below it")
        _count_axis(axes)

    outcome = f"{selection.summary.n_selected:,} selected" if threshold is not None else "nothing is selected"
    line = "a line that the curve must reach" if slope is not None else "no line, as this procedure has none"
    caption = "All documents up to the last point where the curve is on or above the line are selected."
    if slope is None:
        caption = "How many audited documents have at most a given p-value."
    return FigureImage(
        file=f"{selection.name}-step-up.png",
        title="How the selection was made",
        alt=f"Audited documents counted up to each p-value, and {line}; {outcome}.",
        caption=caption if threshold is not None or slope is None else f"{caption} Here it never is.",
        png=_render(paint),
    )


def _right_edge(threshold: float | None, slope: float | None, m: int, n: int) -> float:
    """The largest p-value worth drawing: past m / slope the line is above every document."""
    least = 12 / (n + 1)
    if threshold is not None:
        return min(1.0, max(2.5 * threshold, least))
    return min(1.0, max(1.2 * m / slope, least)) if slope else 1.0


def _thinned(
    p: np.ndarray, reached: np.ndarray, right: float, threshold: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """At most about MAX_POINTS steps of the curve on [0, right], the threshold's among them."""
    inside = int(np.searchsorted(p, right, side="right"))
    keep = np.arange(inside)
    if inside > MAX_POINTS:
        even = np.linspace(0, inside - 1, MAX_POINTS).astype(np.int64)
        at = np.searchsorted(p, threshold if threshold is not None else right, side="right") - 1
        keep = np.unique(np.append(even, min(max(int(at), 0), inside - 1)))
    last = reached[inside - 1] if inside else 0
    return np.concatenate(([0.0], p[keep], [right])), np.concatenate(([0], reached[keep], [last]))
