"""The sentences of a report. None may claim more than the selection's guarantee, and no guarantee is assumed."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pipeline.config.selection import ESTIMATING
from pipeline.report.facts import Run, Selection
from pipeline.selection.knockoff import fewest
from pipeline.selection.step_up import calibration_needed

_READABLE_FORMATS = {"\u200c", "\u200d"}  # joiners: many scripts and emoji cannot be written without them


_ABOUT_POWER = {"resolution"}  # what can be found at all; a bad one takes nothing from what was found
Verdict = Literal["failed", "limited", "passed", "noted"]


@dataclass(frozen=True, slots=True)
class Check:
    """One diagnostic. A failed one casts doubt on the guarantee; a limited one only on what could be found."""

    name: str
    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one selection: what was found, on what terms, and what takes away from it."""

    name: str
    headline: str
    terms: str
    doubts: tuple[str, ...]  # failed checks: the terms may not hold
    cautions: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """All of it in one line, for those who copy one line."""
        return " ".join((self.headline, self.terms, *self.doubts, *self.cautions))


def visible(text: str) -> str:
    """Text in which nothing hides: controls, bidirectional overrides and the like appear as their code points."""
    return "".join(character if _shows(character) else f"⟨U+{ord(character):04X}⟩" for character in text)


def _shows(character: str) -> bool:
    if character in "\n\t" or character in _READABLE_FORMATS:
        return True
    return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def percent(share: float) -> str:
    """A share as a percentage without needless digits: 0.1 is 10%."""
    return f"{100 * share:.6g}%"


def documents(count: int) -> str:
    """A count with its noun."""
    return f"{count:,} document{'' if count == 1 else 's'}"


def model_name(model: dict[str, Any]) -> str:
    """The audited model as the config names it."""
    if model.get("endpoint"):
        return f"{model.get('name')} at {model['endpoint']}"
    name = str(model.get("path"))
    if model.get("gguf_file"):
        name += f" ({model['gguf_file']})"
    return f"{name} with adapter {model['adapter']}" if model.get("adapter") else name


def answer(run: Run, selection: Selection) -> Answer:
    """What a selection found, in sentences whose certainty is that of its guarantee."""
    summary = selection.summary
    model = model_name(run.manifest.get("config", {}).get("model", {}))
    audited = f"Of {summary['n_audit']:,} audited document{'' if summary['n_audit'] == 1 else 's'}"
    if run.limit is not None:
        audited += f" (a sample: the first {run.limit:,} of each role, not the whole corpus)"
    kind = "part of" if summary["direction"] == "members" else "not part of"
    chosen = summary["n_selected"]
    verb = "was" if chosen <= 1 else "were"
    number = f"{chosen:,}" if chosen else "none"
    return Answer(
        name=selection.name,
        headline=f"{audited}, {number} {verb} selected as {kind} the training data of {model}"
        f"{_unproved(summary)}{_unsupported(summary)}.",
        terms=_terms(summary) if chosen else _nothing(summary),
        doubts=tuple(_doubts(summary)),
        cautions=tuple(_cautions(selection)),
    )


def _unproved(summary: dict[str, Any]) -> str:
    """What the first sentence says of a selection whose share of wrong documents nothing bounds."""
    if summary["guarantee"] in ("finite-sample", "asymptotic") or not summary["n_selected"]:
        return ""
    return ", by a procedure for which no guarantee is proved"


def _unsupported(summary: dict[str, Any]) -> str:
    """What the first sentence says of a selection whose blind test failed."""
    if summary.get("supported", True):
        return ""
    return (
        ", but this answer is not supported: their words alone tell the audited from the calibration documents, "
        "so they differ in more than membership"
    )


def _terms(summary: dict[str, Any]) -> str:
    alpha = percent(summary["alpha"])
    wrong = "not part of" if summary["direction"] == "members" else "part of"
    share = f"the share of wrong documents (in truth {wrong} the training data) in such a selection"
    if summary["guarantee"] == "finite-sample" and summary.get("calibration") == "conditional":
        return f"{summary['promise']} It rests on this: {summary['assumption']}"
    if summary["guarantee"] == "finite-sample":
        return (
            f"On average over repetitions of the whole audit with fresh documents, {share} is at most {alpha}, "
            f"if this holds: {summary['assumption']}"
        )
    if summary["guarantee"] == "asymptotic":
        return (
            f"On average over repetitions, {share} is approximately at most {alpha} for large samples; this is not "
            f"guaranteed at this size, and the share can be higher. {_strict(summary)} Even the approximation needs "
            f"this to hold: {summary['assumption']}"
        )
    return (
        f"No guarantee is proved for this procedure ({summary['procedure']}): it aims at {alpha}, and {share} can be "
        f"higher. {_strict(summary)} It was built on this assumption: {summary['assumption']}"
    )


def _strict(summary: dict[str, Any]) -> str:
    strict = summary.get("strict")
    if not strict or strict.get("guarantee", "finite-sample") != "finite-sample":
        return "No procedure with a finite-sample guarantee was computed beside it."
    return (
        f"The procedure with a finite-sample guarantee ({strict['procedure']}) selects "
        f"{strict['n_selected']:,} of {summary['n_audit']:,}."
    )


def _nothing(summary: dict[str, Any]) -> str:
    was = "was not" if summary["direction"] == "members" else "was"
    text = (
        f"This is not evidence that the model {was} trained on them: it only says that the evidence at hand does not "
        f"reach as far as a list at alpha = {percent(summary['alpha'])}."
    )
    least = summary["minimum_selectable"]
    if summary["procedure"] == "ktd":
        text += " " + fewest(Fraction(repr(float(summary["alpha"]))), summary["n_audit"])[1]
    elif least > summary["n_audit"] and summary.get("calibration", "pooled") != "pooled":
        text += f" With {documents(summary['n_calibration'])} for calibration nothing could ever have been selected."
    elif least > summary["n_audit"]:
        text += " " + _never(summary)
    elif least > 1:
        text += (
            f" With {documents(summary['n_calibration'])} for calibration a selection holds at least {least:,} or "
            "none: fewer could not have been found, however strong the evidence."
        )
    return text if summary["guarantee"] == "finite-sample" else f"{text} {_strict(summary)}"


def _never(summary: dict[str, Any]) -> str:
    n, m = summary["n_calibration"], summary["n_audit"]
    text = (
        f"With only {documents(n)} for calibration nothing could ever have been selected: the smallest possible "
        f"p-value is 1/{n + 1:,}, and at least {summary['minimum_selectable']:,} of {documents(m)} would have to "
        "reach it."
    )
    harmonic = summary.get("details", {}).get("harmonic_sum", 1.0)
    alpha = Fraction(repr(float(summary["alpha"])))
    factor = summary.get("factor") or summary["null_proportion"] * harmonic
    least, good = (calibration_needed(m, alpha, count, factor) for count in (m, max(1, m // 100)))
    if least > n:
        text += (
            f" To change this, give more calibration documents (at least about {least:,} for anything to be "
            f"selectable; about {good:,} for a selection of one in a hundred) or allow a larger alpha."
        )
    return text


def _doubts(summary: dict[str, Any]) -> list[str]:
    failed = (check for check in checks(summary) if check.verdict == "failed")
    return [f"Check failed ({check.name}): {check.sentence}" for check in failed]


def _cautions(selection: Selection) -> list[str]:
    summary = selection.summary
    found = []
    if summary["n_selected"] and not tested(summary):
        found.append("Whether audited and calibration documents differ in more than membership was not tested.")
    if summary["n_quarantined"]:
        count = summary["n_quarantined"]
        as_one = "counts as a hypothesis" if count == 1 else "count as hypotheses"
        found.append(f"{count:,} of the audited documents could not be scored and {as_one} with p = 1.")
    unlisted = summary["n_selected"] - selection.n_rows
    if unlisted > 0:
        found.append(f"The count includes {documents(unlisted)} without a row in the list of the selected.")
    return found


def checks(summary: dict[str, Any]) -> list[Check]:
    """The diagnostics of a selection, whatever kinds there are; failed ones first."""
    found = []
    for name, value in (summary.get("diagnostics") or {}).items():
        entry: dict[str, Any] = value if isinstance(value, dict) else {"sentence": str(value)}
        sentence = str(entry.get("sentence") or "No sentence was recorded for this check.")
        found.append(Check(name, _verdict(name, entry.get("ok")), sentence))
    return sorted(found, key=lambda check: check.verdict != "failed")


def _verdict(name: str, ok: bool | None) -> Verdict:
    if ok is None:
        return "noted"
    if ok:
        return "passed"
    return "limited" if name in _ABOUT_POWER else "failed"


def tested(summary: dict[str, Any]) -> bool:
    """Whether a check asked if the words alone tell calibration from audited documents."""
    return ((summary.get("diagnostics") or {}).get("blind") or {}).get("ok") is not None


def notices(run: Run) -> list[str]:
    """What a reader must know before the first answer."""
    found: list[str] = []
    if run.limit is not None:
        found.append(
            f"This is a sample: only the first {run.limit:,} documents of each role were read. "
            "Nothing here is about the whole corpus."
        )
    gradient = run.manifest.get("gradient") or {}
    if left_out := gradient.get("quantised"):
        found.append(
            f"The model is quantised: gradient_norm is the norm over the {gradient['differentiable']:,} parameter "
            f"tensors that can be differentiated, and leaves out {left_out:,} quantised ones."
        )
    if transform := run.manifest.get("config", {}).get("text_transform"):
        done = "Dates and years are taken out of every text"
        if transform["dates"] == "replace_year":
            done = f"The year {transform['year']} stands in the place of every year in every text"
        found.append(f"{done}, before any use. Texts that are shown here are changed so.")
    if run.state in ("failed", "incomplete"):
        found.append(f"The run ended in the state “{run.state}”: what stands here may be partial.")
    unread = len(run.shards) - run.n_receipts
    if run.shards and unread > 0:
        found.append(f"{unread:,} of {len(run.shards):,} parts of the corpus are not scored: this run is not complete.")
    if not run.selections:
        found.append(
            "No selection has been made. Documents were scored, and scores alone say nothing about membership."
        )
    elif run.missing:
        found.append(f"Asked for and not made yet: {', '.join(run.missing)}.")
    return found + _disagreements(run)


def fine_tuned(run: Run) -> dict[str, str]:
    """What the adapters of the `fsd` detector were trained on, by name."""
    return {
        name: f"{one['training']['method']}, {one['training']['epochs']} epochs on {len(one['documents']):,} documents "
        f"of {' and '.join(one['train_on'])}, which do not calibrate"
        for name, one in (run.manifest.get("adapters") or {}).items()
    }


def _disagreements(run: Run) -> list[str]:
    audited = next((role.n_in for role in run.roles if role.role == "audit"), None)
    return [
        f"Selection “{selection.name}” counts {selection.summary['n_audit']:,} audited documents, and the run holds "
        f"{audited:,}: it was made from other scores. Make it again before relying on it."
        for selection in run.selections
        if audited is not None and selection.summary["n_audit"] != audited
    ]


def null_share(summary: dict[str, Any]) -> tuple[float, bool]:
    """The null share that the procedure used, and whether it was estimated; uncapped where the rule has no cap."""
    details = summary.get("details") or {}
    if summary["procedure"] == "storey" and "null_proportion_unclipped" in details:
        return float(details["null_proportion_unclipped"]), True
    share = float(summary["null_proportion"])
    return share, share != 1 or summary["procedure"] in ESTIMATING  # a plugin's procedure is in no list


def not_covered(selections: Sequence[Selection]) -> list[str]:
    """What the guarantee does not mean, in the words of those who will want it to."""
    found = [
        "It is an average over repetitions of the whole audit with fresh documents (a repetition that selects nothing "
        "counts as 0% wrong). It is not a statement about this one list: the share of wrong documents in it is "
        "unknown and can be higher or lower.",
        "It is not a statement about any one document. No single document is proven to be in the training data or "
        "outside it, and a p-value is not the probability that a document was selected wrongly.",
        "Documents that were not selected are not shown to be the opposite of the selected ones.",
        "The evidence is about a text, not about where it came from. A model that met the same or nearly the same "
        "text elsewhere, such as in a copy, a quotation or a later edition, looks the same to these methods.",
        "It holds for a question that was fixed before its answer was seen, not for the best of several tries.",
    ]
    if len(selections) > 1:
        found.append(
            f"Each of the {len(selections)} selections has its own guarantee. None covers all of them together, or "
            "the one picked because of its answer."
        )
    return found
