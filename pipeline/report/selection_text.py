"""The answer of a selection. No sentence may claim more than its guarantee, and no guarantee is assumed.

A run with several questions also gets the notices of the run and the effect of its history on a guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from pydantic import JsonValue

from pipeline.answers.stated_bounds import bound_clause, bound_text, bounds_not_covered
from pipeline.answers.summarise import learnt_sentences
from pipeline.checks.blind import differing_clause, untested_note
from pipeline.checks.dependent_documents import GroupsDiagnostic, NearDuplicatesDiagnostic, what_holds
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.checks.resolution import ResolutionDiagnostic, applied_in, shortest
from pipeline.checks.sign_symmetry import SymmetryDiagnostic
from pipeline.config.selection import SelectionConfig
from pipeline.report.brief import checks, n_versions
from pipeline.report.contents import AnswerText, HistoryReport, PastQuestion, model_name
from pipeline.report.facts import RunFacts, SelectionFacts
from pipeline.results.history import HistoryEntry, count_questions, several_questions
from pipeline.results.summary import Summary
from pipeline.run.manifest import RecordedModel
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.guarantees import ConclusionValue, Outcome
from pipeline.selection.procedures import procedure_of
from pipeline.selection.ranked import Rule, known_needed
from pipeline.wording import documents, percent, sample_of, was

LISTED_QUESTIONS = 50
_COLUMNS = {"name", "direction", "detectors", "procedure", "alpha"}


def answer_text(run: RunFacts, selection: SelectionFacts) -> AnswerText:
    """The answer of a selection in sentences that are as certain as its guarantee."""
    summary = selection.summary
    audited = f"Of {summary.n_audit:,} audited document{'' if summary.n_audit == 1 else 's'}"
    if summary.limit is not None:
        audited += f" (a sample: the first {summary.limit:,} of each role, not the whole corpus)"
    part = "part of" if summary.direction == "members" else "not part of"
    number = f"{summary.n_selected:,} {was(summary.n_selected)}" if summary.n_selected else "none was"
    headline = (
        f"{_support_sentence(summary)}{audited}, {number} selected as {part} the training data of "
        f"{model_name(run.manifest.config.model)}{_proof_clause(summary)}{bound_clause(summary)}."
    )
    terms = _guarantee(summary) if summary.n_selected else _empty_answer(summary)
    doubts, cautions = _doubts(summary), _cautions(summary)
    if (remark := several_questions(run.history)) is not None:
        cautions.append(f"{remark} Section 2 lists them.")
    bound = bound_text(summary)
    sentence = " ".join((headline, *([bound] if bound else []), terms, *doubts, *cautions))
    return AnswerText(sentence=sentence, headline=headline, bound=bound, terms=terms, doubts=doubts, cautions=cautions)


def _proof_clause(summary: Summary) -> str:
    """The clause of the first sentence for a selection without a bound on the share of wrong documents."""
    if summary.guarantee in ("finite-sample", "asymptotic") or not summary.n_selected:
        return ""
    return ", by a procedure for which no guarantee is proved"


def _support_sentence(summary: Summary) -> str:
    """The sentence before the count of a selection that a check contradicts."""
    if summary.conclusion != ConclusionValue.CONTRADICTED:
        return ""
    why = "a check of what this answer assumes has failed"
    if (blind := summary.diagnostics.result(BlindDiagnostic)).outcome == Outcome.FAILED:
        why = differing_clause(blind)
    return f"Contradicted: {why}. "


def _guarantee(summary: Summary) -> str:
    alpha = percent(summary.alpha)
    wrong = "not part of" if summary.direction == "members" else "part of"
    share = f"the share of wrong documents (in truth {wrong} the training data) in such a selection"
    if summary.conclusion == ConclusionValue.CONTRADICTED:
        return _void_guarantee(summary, share)
    own_words = calibration_of(summary.calibration).conditional or procedure_of(summary.procedure).per_list
    if summary.guarantee == "finite-sample" and own_words:
        return f"{summary.promise} It rests on this: {summary.assumption}"
    if summary.guarantee == "finite-sample" and summary.series is not None:
        place = summary.series
        return (
            f"This is {place.sentence}. On average over repetitions of the whole schedule, of all that its scans "
            f"select together at most {percent(place.alpha)} is wrong, if this holds in each: {summary.assumption}"
        )
    if summary.guarantee == "finite-sample":
        return (
            f"On average over repetitions of the whole audit with fresh documents, {share} is at most {alpha}, "
            f"if this holds: {summary.assumption}"
        )
    if summary.guarantee == "asymptotic":
        return (
            f"On average over repetitions, {share} is approximately at most {alpha} for large samples; this is not "
            f"guaranteed at this size, and the share can be higher. {_strict_sentence(summary)} Even the approximation "
            f"requires this: {summary.assumption}"
        )
    return (
        f"No guarantee is proved for this procedure ({summary.procedure}): it aims at {alpha}, and {share} can be "
        f"higher. {_strict_sentence(summary)} It was built on this assumption: {summary.assumption}"
    )


def _void_guarantee(summary: Summary, share: str) -> str:
    """States that a check contradicts the assumption, and the aim that is therefore void."""
    text = (
        f"Nothing is guaranteed for this selection: {share} can be anything. The procedure ({summary.procedure}) aims "
        f"at {percent(summary.alpha)} under this assumption, which a check contradicts: {summary.assumption}"
    )
    failed = sum(check.verdict == "failed" for check in checks(summary))
    symmetry = summary.diagnostics.find(SymmetryDiagnostic)
    if (others := _with_dependent_documents(summary, failed)) is not None:
        return f"{text} {others}"
    if (
        failed == 1 and symmetry is not None and symmetry.outcome == Outcome.FAILED
    ):  # which the strict answer does not assume
        return f"{text} {_strict_sentence(summary)}"
    if summary.guarantee == summary.strict.guarantee:
        return text  # the answer itself is the strict one
    return f"{text} Nothing is guaranteed for the strict answer beside it ({summary.strict.procedure}) either."


def _with_dependent_documents(summary: Summary, failed: int) -> str | None:
    """What bh and storey select, where nothing but dependent audited documents contradicts the answer; else None.

    Args:
        summary: the answer.
        failed: number of its failed checks.
    """
    made = [summary.diagnostics.find(NearDuplicatesDiagnostic), summary.diagnostics.find(GroupsDiagnostic)]
    failures = [check for check in made if check is not None and check.outcome == Outcome.FAILED]
    return what_holds(failures, summary.n_audit) if failed == len(failures) else None


def _strict_sentence(summary: Summary) -> str:
    strict = summary.strict
    return (
        f"The procedure with a {strict.guarantee} guarantee ({strict.procedure}) selects "
        f"{strict.n_selected:,} of {summary.n_audit:,}."
    )


def _empty_answer(summary: Summary) -> str:
    was = "was not" if summary.direction == "members" else "was"
    text = (
        f"This is not evidence that the model {was} trained on them: the scores only do not suffice for a list at "
        f"alpha = {percent(summary.alpha)}."
    )
    least, procedure = summary.minimum_selectable, procedure_of(summary.procedure)
    if n_versions(summary) is not None:
        text += f" {summary.diagnostics.result(ResolutionDiagnostic).sentence}"
    elif procedure.fewest is not None:
        text += " " + procedure.fewest(summary.detectors, Fraction(repr(summary.alpha)), summary.n_audit)[1]
    elif least > summary.n_audit and (procedure.per_list or not calibration_of(summary.calibration).plain):
        text += f" With {documents(summary.n_calibration)} for calibration {shortest(summary)}."
    elif least > summary.n_audit:
        text += " " + _resolution_limit(summary)
    elif least > 1:
        text += (
            f" With {documents(summary.n_calibration)} for calibration {shortest(summary)}: fewer could not have been "
            "selected, however strong the evidence."
        )
    return text if summary.guarantee == "finite-sample" else f"{text} {_strict_sentence(summary)}"


def _resolution_limit(summary: Summary) -> str:
    n, m = summary.n_calibration, summary.n_audit
    text = (
        f"With only {documents(n)} for calibration {shortest(summary)}: the smallest possible "
        f"p-value is 1/{n + 1:,}, and at least {summary.minimum_selectable:,} of {documents(m)} would have to "
        "reach it."
    )
    procedure, halved = applied_in(summary)
    factor = Fraction(repr(summary.factor or summary.null_proportion))
    rule = Rule(procedure, Fraction(repr(summary.alpha)), halved=halved)
    few = max(1, m // 100)
    size = "a single one" if few == 1 else "one in a hundred"
    least, good = (known_needed(rule, m, count, factor) for count in (m, few))
    if rule.calibrating(least) > n:
        text += (
            f" To change this, give more calibration documents (at least about {least:,} for anything to be "
            f"selectable; about {good:,} for a selection of {size}{', half of which calibrate' * halved}) or "
            "allow a larger alpha."
        )
    return text


def _doubts(summary: Summary) -> list[str]:
    failed = (check for check in checks(summary) if check.verdict == "failed")
    return [f"{check.title} failed: {check.sentence}" for check in failed]


def _cautions(summary: Summary) -> list[str]:
    cautions, blind = learnt_sentences(summary), summary.diagnostics.result(BlindDiagnostic)
    if (summary.n_selected or summary.bound) and blind.outcome == Outcome.INCONCLUSIVE:
        cautions.append(untested_note(blind))
    if summary.smoothed is not None:
        cautions.append(summary.smoothed.sentence(summary.n_selected))
    if summary.n_quarantined:
        as_one = "counts as a hypothesis" if summary.n_quarantined == 1 else "count as hypotheses"
        cautions.append(
            f"{summary.n_quarantined:,} of the audited documents could not be scored and {as_one} with p = 1."
        )
    return cautions


def not_covered(selections: Sequence[SelectionFacts]) -> list[str]:
    """Limits of the guarantee, against common misreadings."""
    sentences = [
        "It is an average over repetitions of the whole audit with fresh documents (a repetition that selects nothing "
        "counts as 0% wrong). It is not a statement about this one list: the share of wrong documents in it is "
        "unknown and can be higher or lower.",
        *bounds_not_covered([selection.summary for selection in selections]),
        "It is not a statement about any one document. No single document is proven to be in the training data or "
        "outside it, and a p-value is not the probability that a document was selected wrongly.",
        "Documents that were not selected are not shown to be the opposite of the selected ones.",
        "The evidence is about a text, not about where it came from. A model that met the same or nearly the same "
        "text elsewhere, such as in a copy, a quotation or a later edition, looks the same to these methods.",
        "It holds for a question that was fixed before any answer was seen, not for the best of several tries.",
    ]
    if len(selections) > 1:
        sentences.append(
            f"Each of the {len(selections)} selections has its own guarantee. None covers all of them together, or "
            "the one picked because of its answer."
        )
    return sentences


def history_report(history: Sequence[HistoryEntry]) -> HistoryReport | None:
    """The questions of a run so far, without times: the same questions and scores give the same page."""
    if not history:
        return None
    questions = [
        PastQuestion(asking=number, others=_other_settings(question.settings), **question.model_dump())
        for number, entry in enumerate(history, 1)
        for question in entry.questions
    ]
    return HistoryReport(
        n_questions=count_questions(history),
        n_askings=len(history),
        sentences=_history_sentences(history, len(questions)),
        last_asked_by=history[-1].command,
        questions=questions[-LISTED_QUESTIONS:],
    )


def _history_sentences(history: Sequence[HistoryEntry], n_lines: int) -> list[str]:
    number = count_questions(history)
    sentences = []
    if number > 1:
        sentences = [
            f"This run was asked {number:,} different questions. An answer, taken by itself, keeps its guarantee if "
            "its question was fixed before any answer was seen: that others were asked as well does not weaken "
            "it.",
            "An answer that was picked because of its result, such as the longest list or the first that is not empty, "
            "has no guarantee, nor has a question that was changed after an answer was seen. The share of wrong "
            "documents in the best of several answers can be larger than the guarantee of any of them.",
            "So report the question that was fixed first, or all of them. A question that was added later "
            "keeps its guarantee on documents of which no answer was seen.",
        ]
    if history[0].command == "select":
        sentences.append("Answers from before the start of this list, if any, are not in it.")
    if n_lines > LISTED_QUESTIONS:
        sentences.append(f"These are the last {LISTED_QUESTIONS} of {n_lines:,} lines.")
    return sentences


def _other_settings(settings: Mapping[str, JsonValue]) -> str:
    """The settings that differ from the default and have no column of their own."""
    fields = {field.alias or name: field for name, field in SelectionConfig.model_fields.items()}
    differing = {
        key: value
        for key, value in settings.items()
        if key not in _COLUMNS and not (key in fields and fields[key].default == value)
    }
    return ", ".join(f"{key} {value}" for key, value in differing.items())


def page_notices(run: RunFacts, texts: bool = True) -> list[str]:
    """Cautions that precede the first answer.

    Args:
        run: facts of the run.
        texts: whether texts may be shown; an error message may quote one.
    """
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
            done = f"The year {transform.year} replaces every year in every text"
        lines.append(f"{done}, before any use. This page shows the changed texts.")
    lines += _changed_scores(manifest.models)
    lines += [f"{doubt}." for doubt in run.doubts]
    if run.state in ("failed", "incomplete"):
        reason = f" The reason: {run.message}." if texts and run.message else ""
        lines.append(f"The run ended in the state “{run.state}”: this page may be incomplete.{reason}")
    unread = len(run.shards) - run.n_receipts
    if unread > 0:
        lines.append(f"{unread:,} of {len(run.shards):,} parts of the corpus are not scored: this run is not complete.")
    if not run.selections:
        lines.append(
            "No selection has been made. Documents were scored, and scores alone say nothing about membership."
        )
    elif run.missing:
        lines.append(f"Configured but not made yet: {', '.join(run.missing)}.")
    return lines + _disagreements(run)


def _changed_scores(models: Mapping[str, RecordedModel]) -> list[str]:
    """A sentence for each endpoint that refuses a parameter which decides what the scores measure."""
    changed = [key for key, one in models.items() if any(made.changes_scores for made in one.changes.values())]
    effect = "its default applies, which changes what the scores measure, and not the error rate"
    return [f"The endpoint{f' of {key}' if len(models) > 1 else ''} refuses temperature: {effect}." for key in changed]


def fine_tuned_notes(run: RunFacts) -> dict[str, str]:
    """The training documents of the adapters of the `fsd` detector, by adapter name."""
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
