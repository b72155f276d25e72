"""The figures of a selection, drawn from counts, so that the time does not depend on the number of documents.

The same counts give the same bytes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pipeline.answers.selected import AlphaCurve, GroupCounts, ScoreHistogram
from pipeline.answers.stated_bounds import condition, share_text
from pipeline.checks.resolution import null_share
from pipeline.report.brief import n_versions
from pipeline.report.facts import RankHistogram, SelectionFacts
from pipeline.report.templates import BLUE, GREEN, INK, ORANGE, FigureImage, count_axis, draw, label, put_legend
from pipeline.results.summary import Summary
from pipeline.selection.guarantees import ConclusionValue
from pipeline.selection.procedures import procedure_of
from pipeline.wording import documents, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROLE_STYLES = {"audit": (BLUE, "-", 0.18), "unseen": (ORANGE, "--", 0.0), "seen": (GREEN, "-.", 0.0)}
ROLE_LABELS = {"audit": "audited", "unseen": "known unseen", "seen": "known seen"}
MAX_POINTS, FEW_POINTS = 200, 40
MAX_BARS, BAR_HEIGHT = 20, 0.2
P_BINS = 20
TAIL = 0.001
WHOLE = (
    " They are of whole ranks; smoothed ones decide. Of documents that are not selected these are not kept, so no QQ "
    "plot and no lists at other alphas are drawn."
)
DIVIDED = " They are those before the division by the weights of groups."
"""What is said beside p-values that do not decide."""
LARGEST_ALPHA = 0.5
"""Upper end of the axis of alpha; the requested alpha where that is larger."""


def draw_figures(selection: SelectionFacts) -> list[FigureImage]:
    """The figures of a selection whose counts are in the run directory."""
    figures, summary = [], selection.summary
    if selection.scores is not None and _drawable(selection.scores):
        figures.append(
            _w_figure(selection, selection.scores)
            if procedure_of(summary.procedure).signed and "audit" in selection.scores.roles
            else _score_figure(selection, selection.scores)
        )
    if selection.ranks is not None and (versions := n_versions(summary)) is not None:
        figures.append(_version_ranks_figure(selection, selection.ranks, versions))
    elif selection.ranks is not None:
        figures.append(_p_value_figure(selection, selection.ranks))
        if summary.smoothed is None:  # whole ranks, which it shows, do not decide
            figures.append(_quantile_figure(selection, selection.ranks))
    if selection.alphas is not None:
        figures.append(_alpha_figure(selection, selection.alphas))
    if selection.groups is not None and len(selection.groups.n_scored) > 1:
        figures.append(_group_figure(selection, selection.groups))
    if summary.weights is not None and len(summary.weights) == len(summary.detectors) > 1:
        figures.append(_weight_figure(selection, summary.weights))
    return figures


# --- scores


def _score_figure(selection: SelectionFacts, scores: ScoreHistogram) -> FigureImage:
    edges, roles = _bins(scores)
    totals = {role: sum(scores.roles[role]) for role in roles}

    def paint(figure: Figure, axes: Axes) -> None:
        for role, counts in roles.items():
            colour, line, fill = ROLE_STYLES.get(role, (INK, ":", 0.0))
            height = counts / (totals[role] * np.diff(edges))
            name = f"{ROLE_LABELS.get(role, role)} ({totals[role]:,})"
            axes.stairs(height, edges, color=colour, linestyle=line, linewidth=1.8, label=name)
            if fill:
                axes.stairs(height, edges, color=colour, alpha=fill, fill=True)
        axes.set_xlabel(f"score: {label(scores.column)} (higher: more member-like)")
        axes.set(ylabel="share of the role per unit of score", ylim=(0, None))
        put_legend(figure)

    medians = " and ".join(
        f"{_median(scores, role):.3g} for {total:,} {ROLE_LABELS.get(role, role)}" for role, total in totals.items()
    )
    outside = sum(total - int(roles[role].sum()) for role, total in totals.items())
    hidden = f" {documents(outside)} with extreme scores are outside the drawn range." if outside else ""
    return draw(
        f"{selection.name}-scores.svg",
        "Scores by role",
        f"Distribution of the score {label(scores.column)} by role; the medians are about {medians} documents.",
        f"Each curve encloses an area of one, so roles of different sizes can be compared.{hidden}",
        paint,
    )


def _w_figure(selection: SelectionFacts, scores: ScoreHistogram) -> FigureImage:
    edges, roles = _bins(scores.model_copy(update={"roles": {"audit": scores.roles["audit"]}}))
    counts, total = roles["audit"], sum(scores.roles["audit"])
    least = selection.summary.details.get("smallest_w_selected")
    n_selected = selection.summary.n_selected

    def paint(figure: Figure, axes: Axes) -> None:
        axes.stairs(counts, edges, color=BLUE, linewidth=1.4, label=f"audited ({total:,})")
        axes.stairs(counts, edges, color=BLUE, alpha=0.18, fill=True)
        axes.axvline(0, color=INK, linewidth=0.8)
        if least is not None:
            axes.axvline(least, color=ORANGE, linestyle="--", label=f"selected from W = {least:.3g} on")
            axes.axvline(-least, color=ORANGE, linestyle=":", label="mirrored below 0: estimates the wrong ones")
        _count_documents(figure, axes, f"W: {label(scores.column)}")

    outcome = f"{n_selected:,} selected" if n_selected else "none is selected"
    outcome += f", from W = {least:.3g} on" if least is not None else ""
    return draw(
        f"{selection.name}-w.svg",
        "W of the audited documents",
        f"Distribution of W over {documents(total)}, with a median of about {_median(scores, 'audit'):.3g}; {outcome}.",
        "Where signs are fair coins for non-members (with direction clean, members), as many of these are left of the "
        "dotted line as right of the dashed one.",
        paint,
    )


def _count_documents(figure: Figure, axes: Axes, xlabel: str) -> None:
    """Label the axes of a histogram of audited documents, and add its legend."""
    axes.set(xlabel=xlabel, ylabel="audited documents", ylim=(0, None))
    count_axis(axes)
    put_legend(figure)


def _median(scores: ScoreHistogram, role: str) -> float:
    """The middle of the bin of the median."""
    counts = np.array(scores.roles[role])
    at = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
    return (scores.edges[at] + scores.edges[at + 1]) / 2


def _drawable(scores: ScoreHistogram) -> bool:
    """Whether there is a score and every bin has a width."""
    return any(map(sum, scores.roles.values())) and bool(np.all(np.diff(scores.edges) > 0))


def _bins(scores: ScoreHistogram) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Adjacent bins merged until the curves are readable, without the outermost tails."""
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


# --- ranks of published versions


def _version_ranks_figure(selection: SelectionFacts, ranks: RankHistogram, versions: int) -> FigureImage:
    """The number of published versions at each rank; documents with fewer versions are scaled to the maximum."""
    counts = np.zeros(versions, dtype=np.int64)
    counts[ranks.rank - 1] = ranks.count
    counts[-1] -= selection.summary.n_quarantined  # documents without scores
    m = int(counts.sum())
    p = selection.summary.details["p_uniform_ranks"]

    def paint(figure: Figure, axes: Axes) -> None:
        edges = np.arange(versions + 1) + 0.5
        axes.stairs(counts, edges, fill=True, color=BLUE, alpha=0.35)
        axes.stairs(counts, edges, color=BLUE, linewidth=1.2, label=f"published versions ({m:,})")
        name = f"evenly spread: {m / versions:,.1f} a rank"
        axes.axhline(m / versions, color=ORANGE, linestyle="--", linewidth=1.8, label=name)
        _count_documents(figure, axes, "rank among the versions of a document (1: highest score)")

    return draw(
        f"{selection.name}-version-ranks.svg",
        "Ranks of the published versions",
        f"Histogram of the ranks of {documents(m)}: {int(counts[0]):,} at rank 1 of {versions:,}, where "
        f"{m / versions:,.1f} are expected of documents that were not learnt (evenly spread: p = {p:.3g}).",
        "A document that the model did not learn has each rank with the same probability, for any score; the dashed "
        "line shows that. Documents that were learnt are at the left.",
        paint,
    )


# --- p-values


def _p_value_figure(selection: SelectionFacts, ranks: RankHistogram) -> FigureImage:
    n, m = selection.summary.n_calibration, int(ranks.count.sum())
    pi0, estimated = null_share(selection.summary)
    cuts = np.unique(np.round(np.linspace(0, n + 1, min(P_BINS, n + 1) + 1)).astype(np.int64))
    reached = np.concatenate(([0], np.cumsum(ranks.count)))
    counts = np.diff(reached[np.searchsorted(ranks.rank, cuts, side="right")])
    edges = cuts / (n + 1)
    null = f"null share {'estimated as' if estimated else 'taken as'} {share_text(pi0)}"

    def paint(figure: Figure, axes: Axes) -> None:
        axes.stairs(counts / (m * np.diff(edges)), edges, fill=True, color=BLUE, alpha=0.35)
        axes.stairs(counts / (m * np.diff(edges)), edges, color=BLUE, linewidth=1.2, label=f"audited ({m:,})")
        axes.axhline(pi0, color=ORANGE, linestyle="--", linewidth=1.8, label=null)
        axes.set(xlim=(0, 1), ylim=(0, None), xlabel="p-value", ylabel="density (1 = uniform)")
        put_legend(figure)

    small = int(ranks.count[ranks.rank * 10 <= n + 1].sum())
    summary = selection.summary
    note = DIVIDED * (summary.groups is not None) + WHOLE * (summary.smoothed is not None)
    return draw(
        f"{selection.name}-p-values.svg",
        "p-values of the audited documents",
        f"Histogram of {m:,} p-values, {small:,} of them at most 0.1, where {m / 10:,.0f} are expected if all are "
        f"evenly spread; {null}, drawn as a level line.",
        "Documents that are just like the calibration documents spread evenly from 0 to 1; the dashed line is "
        f"their share, {'estimated by the procedure' if estimated else 'which this procedure takes to be all'}. "
        f"Documents that could not be scored are at p = 1.{note}",
        paint,
    )


def _slope(summary: Summary, m: int) -> float | None:
    """Documents per unit of p on the line that the curve must reach; None for procedures without such a line."""
    return None if summary.factor is None or summary.groups is not None else summary.factor * m / summary.alpha


def _quantile_figure(selection: SelectionFacts, ranks: RankHistogram) -> FigureImage:
    """A QQ plot; the step-up rule selects up to the last point on or below a line that is parallel to the diagonal."""
    summary, n, m = selection.summary, selection.summary.n_calibration, int(ranks.count.sum())
    threshold, slope = None if summary.groups else summary.threshold, _slope(summary, m)
    p, reached = ranks.rank / (n + 1), np.cumsum(ranks.count)
    expected, observed = _thinned(reached / m, p, threshold)
    low = min(1 / (n + 1), expected[0])

    def paint(figure: Figure, axes: Axes) -> None:
        points = ".-" if expected.size <= FEW_POINTS else "-"
        axes.plot(expected, observed, points, color=BLUE, linewidth=1.8, markersize=4, label=f"audited ({m:,})")
        ends = np.array([low, 1.0])
        axes.plot(ends, ends, color=INK, linewidth=1, linestyle=":", label="evenly spread p-values")
        if slope is not None:
            name = f"selected up to the last point below: alpha = {percent(summary.alpha)}"
            axes.plot(ends, ends * m / slope, color=ORANGE, linestyle="--", linewidth=1.5, label=name)
        if threshold is not None:
            axes.axhline(
                threshold, color=GREEN, linestyle="-.", linewidth=1.2, label=f"largest selected: {threshold:.3g}"
            )
        axes.set(xscale="log", yscale="log", xlim=(0.8 * low, 1.2), ylim=(0.8 / (n + 1), 1.2))
        axes.set_xlabel("share of documents with such a p-value or a smaller one")
        axes.set_ylabel("p-value")
        plain_logs(axes)
        put_legend(figure)

    outcome = "selected by p-values divided by weights" if summary.groups else "nothing is selected"
    if threshold is not None:
        below = int(ranks.count[p <= threshold].sum())
        outcome = (
            f"{below:,} of {m:,} are at most the threshold {threshold:.3g}, where {threshold * m:,.0f} are expected if "
            "all are evenly spread"
        )
    caption = "Below the dotted diagonal there are more small p-values than evenly spread ones."
    if slope is not None:
        never = "" if threshold is not None else " Here no point is."
        caption += f" All documents up to the last point on or below the dashed line are selected.{never}"
    return draw(
        f"{selection.name}-quantiles.svg",
        "p-values against evenly spread ones (QQ plot)",
        f"Sorted p-values against the share of documents up to each, on logarithmic axes; {outcome}.",
        caption,
        paint,
    )


def plain_logs(axes: Axes) -> None:
    """Few ticks of logarithmic axes, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_minor_locator(LogLocator(subs=(2, 5), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _thinned(x: np.ndarray, y: np.ndarray, threshold: float | None) -> tuple[np.ndarray, np.ndarray]:
    """About MAX_POINTS points, evenly spaced on a logarithmic axis, including the last with y at most the threshold."""
    if x.size > MAX_POINTS:
        even = np.searchsorted(x, np.geomspace(x[0], x[-1], MAX_POINTS))
        at = np.searchsorted(y, 1.0 if threshold is None else threshold, side="right") - 1
        keep = np.unique(np.clip(np.append(even, at), 0, x.size - 1))
        return x[keep], y[keep]
    return x, y


# --- other alphas, groups and detectors


def _alpha_figure(selection: SelectionFacts, whole: AlphaCurve) -> FigureImage:
    curve = _up_to(whole, max(selection.summary.alpha, LARGEST_ALPHA))
    alpha, at = selection.summary.alpha, curve.alphas.index(selection.summary.alpha)
    size, void = curve.n_selected[at], selection.summary.conclusion == ConclusionValue.CONTRADICTED
    bounds = None if selection.summary.bound is None else curve.right_at_least
    sure = percent(curve.confidence) if curve.confidence is not None else ""

    def paint(figure: Figure, axes: Axes) -> None:
        step = partial(axes.step, where="post", linewidth=1.6)
        step(curve.alphas, curve.n_selected, color=BLUE, label="selected")
        if bounds is not None:
            step(
                curve.alphas,
                bounds,
                color=ORANGE,
                linestyle="--",
                label=f"of these right at least, with {sure} confidence",
            )
        axes.axvline(alpha, color=INK, linestyle=":", linewidth=1.2)
        axes.plot([alpha], [size], "o", color=BLUE, label=f"the answer: alpha = {percent(alpha)}, {size:,} selected")
        axes.set(xlim=(0, None), ylim=(0, 1.05 * max(1, *curve.n_selected)), xlabel="alpha", ylabel="documents")
        count_axis(axes)
        put_legend(figure)

    right = "" if bounds is None else f"; with {sure} confidence at least {bounds[at]:,} of these are right"
    right += condition(selection.summary) if bounds is not None else ""
    kept = "The guarantee holds at the configured alpha, and is lost if alpha is chosen by this figure"
    if bounds is not None:
        kept += "; the bound, if its assumption holds, covers all points at once"
    if void:
        kept = "Nothing is guaranteed at any alpha: a check contradicts the assumption of the guarantee"
    most, widest = curve.n_selected[-1], percent(curve.alphas[-1])
    return draw(
        f"{selection.name}-alphas.svg",
        "Selected at other values of alpha",
        f"Documents selected against alpha: {size:,} at the requested {percent(alpha)}{right}; {most:,} at {widest}.",
        f"{kept}.",
        paint,
    )


def _up_to(curve: AlphaCurve, alpha: float) -> AlphaCurve:
    count = sum(value <= alpha for value in curve.alphas)
    right = None if curve.right_at_least is None else curve.right_at_least[:count]
    changes = {"alphas": curve.alphas[:count], "n_selected": curve.n_selected[:count], "right_at_least": right}
    return curve.model_copy(update=changes)


def _group_figure(selection: SelectionFacts, groups: GroupCounts) -> FigureImage:
    names = sorted(groups.n_scored, key=lambda name: (-groups.n_selected[name], -groups.n_scored[name], name))
    shown, left = names[:MAX_BARS], len(names) - MAX_BARS
    place = np.arange(len(shown))[::-1]
    selected, scored = (np.array([counts[name] for name in shown]) for counts in (groups.n_selected, groups.n_scored))

    def paint(figure: Figure, axes: Axes) -> None:
        axes.barh(place, scored, color=BLUE, alpha=0.25, label="audited, with a score")
        axes.barh(place, selected, color=BLUE, height=0.5, label="selected")
        axes.set_yticks(place, [label(name) for name in shown])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("documents")
        put_legend(figure)
        figure.set_figheight(max(figure.get_figheight(), BAR_HEIGHT * len(shown) + 1))

    most = ", ".join(f"{label(n)} {groups.n_selected[n]:,} of {groups.n_scored[n]:,}" for n in shown[:5])
    rest = f" {left:,} more groups are not drawn." if left > 0 else ""
    return draw(
        f"{selection.name}-groups.svg",
        "Selected by group",
        f"Selected documents by group, {len(names):,} groups; most in: {most}.",
        f"The guarantee covers all selected documents together, not a single group.{rest}",
        paint,
    )


def _weight_figure(selection: SelectionFacts, weights: list[float]) -> FigureImage:
    pairs = sorted(zip(weights, selection.summary.detectors, strict=True), key=lambda pair: (-pair[0], pair[1]))
    shown, left = pairs[:MAX_BARS], len(pairs) - MAX_BARS
    place = np.arange(len(shown))[::-1]

    def paint(figure: Figure, axes: Axes) -> None:
        axes.barh(place, [weight for weight, _ in shown], color=BLUE, height=0.6)
        axes.set_yticks(place, [label(name) for _, name in shown])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("weight")
        figure.set_figheight(min(figure.get_figheight(), BAR_HEIGHT * len(shown) + 1))

    rest = f" {left:,} more are not drawn." if left > 0 else ""
    counted = "fused statistic"
    if selection.summary.learn is not None:
        counted = "score, per unit of its spread, found without knowing which documents are which"
    return draw(
        f"{selection.name}-weights.svg",
        "Weights of the fused detectors",
        f"Weights of {len(pairs):,} detectors: {', '.join(f'{label(name)} {weight:.3g}' for weight, name in shown)}.",
        f"How much each detector counts in the {counted}.{rest}",
        paint,
    )
