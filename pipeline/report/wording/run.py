"""What a reader must know of a run before its first answer."""

from __future__ import annotations

from pipeline.report.facts import RunFacts
from pipeline.report.wording.numbers import sample_of


def notices(run: RunFacts) -> list[str]:
    """What a reader must know before the first answer."""
    lines: list[str] = []
    manifest = run.manifest
    if manifest.limit is not None:
        lines.append(f"{sample_of(manifest.limit)} Nothing here is about the whole corpus.")
    if manifest.gradient is not None and manifest.gradient.quantised:
        lines.append(
            f"The model is quantised: gradient_norm is the norm over the {manifest.gradient.differentiable:,} "
            f"parameter tensors that can be differentiated, and leaves out {manifest.gradient.quantised:,} quantised "
            "ones."
        )
    if (transform := manifest.config.text_transform) is not None:
        done = "Dates and years are taken out of every text"
        if transform.dates == "replace_year":
            done = f"The year {transform.year} stands in the place of every year in every text"
        lines.append(f"{done}, before any use. Texts that are shown here are changed so.")
    if run.state in ("failed", "incomplete"):
        lines.append(f"The run ended in the state “{run.state}”: what stands here may be partial.")
    unread = len(run.shards) - run.n_receipts
    if unread > 0:
        lines.append(f"{unread:,} of {len(run.shards):,} parts of the corpus are not scored: this run is not complete.")
    if not run.selections:
        lines.append(
            "No selection has been made. Documents were scored, and scores alone say nothing about membership."
        )
    elif run.missing:
        lines.append(f"Asked for and not made yet: {', '.join(run.missing)}.")
    return lines + _disagreements(run)


def fine_tuned(run: RunFacts) -> dict[str, str]:
    """What the adapters of the `fsd` detector were trained on, by name."""
    return {
        name: f"{adapter.training.method}, {adapter.training.epochs} epochs on {len(adapter.documents):,} "
        f"documents of {' and '.join(adapter.train_on)}, which do not calibrate"
        for name, adapter in run.manifest.adapters.items()
    }


def _disagreements(run: RunFacts) -> list[str]:
    audited = next((role.n_in - role.n_judged for role in run.roles if role.role == "audit"), None)
    return [
        f"Selection “{selection.name}” counts {selection.summary.n_audit:,} audited documents, and the run holds "
        f"{audited:,}: it was made from other scores. Make it again before relying on it."
        for selection in run.selections
        if audited is not None and selection.summary.n_audit != audited
    ]
