"""Write the report: one HTML page that needs nothing else, the same facts as JSON, and the figures as files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pipeline.audit.history import several_questions
from pipeline.audit.records import Record
from pipeline.config.models import ModelConfig, display_name
from pipeline.errors import DamagedError, visible
from pipeline.report.contents import ModelReport, QuarantineReport, Report, SelectedDocument, SelectionReport
from pipeline.report.facts import RunFacts, SelectionFacts, read_facts
from pipeline.report.figures import draw_figures
from pipeline.report.names import Folders, model_name
from pipeline.report.rows import read_listings
from pipeline.report.svg import FigureImage
from pipeline.report.templates import page_script, render, script_hash
from pipeline.report.wording.brief import assumptions, brief_answer
from pipeline.report.wording.checks import checks, common_checks, common_lights, common_notes
from pipeline.report.wording.history import fine_tuned, history_report, notices
from pipeline.report.wording.selection import answer_text, not_covered, untested
from pipeline.store.files import Store

NOT_AVAILABLE = "text not available"
PAGE_SIZE = 4_800_000
"""Characters of a page at most, where its figures leave that room to the documents."""
LEAST_ROOM = 500_000


def write_report(store: Store, texts: bool = True) -> str:
    """Write report/report.html, report/report.json and report/figures/*.svg from the run directory alone.

    Figures of selections that are no longer there are removed. The same run directory gives the same bytes.

    Args:
        store: the run directory.
        texts: whether excerpts of the first selected documents are shown; without them no document's text, nor an
            error message that may quote one, is written anywhere under report/.

    Returns:
        the path or URL of report.html.

    Raises:
        UserError: not a run directory, a damaged file in it, or one of another version.
    """
    run = read_facts(store)
    figures = {selection.name: draw_figures(selection) for selection in run.selections}
    report = _report(run, texts, figures)
    drawn = [figure for group in figures.values() for figure in group]
    for figure in drawn:
        store.write(f"report/figures/{figure.file}", figure.svg)
    for name in store.names("report/figures"):
        if name not in {figure.file for figure in drawn}:
            store.remove(f"report/figures/{name}")
    store.write_json("report/report.json", report.plain())
    store.write("report/report.html", _html(store, run, report, figures).encode("utf-8", "replace"))
    return f"{store.url}/report/report.html"


def rewrite_report(store: Store) -> None:
    """Write the report anew where there is one, with texts or without them as it was.

    Raises:
        DamagedError: what is there does not tell whether it shows texts.
        UserError: as `write_report`.
    """
    name, remedy = "report/report.json", f"seenset report {store.url} writes it again"
    try:
        earlier = store.read_json(name)
    except DamagedError as error:
        raise DamagedError(f"{error}; {remedy}") from None
    if earlier is None:
        return
    texts = earlier.get("texts") if isinstance(earlier, dict) else None
    if not isinstance(texts, bool):
        raise DamagedError(f"{store.url}/{name} is damaged: it does not say whether texts are shown; {remedy}")
    write_report(store, texts)


# --- contents


def _report(run: RunFacts, texts: bool, figures: dict[str, list[FigureImage]]) -> Report:
    """Everything that the page says; without texts, no text of a document."""
    return Report(
        run=run.url,
        limit=run.manifest.limit,
        texts=texts,
        answered_at=run.history[-1].when if run.history else None,
        notices=notices(run),
        model=_model(run),
        selections=[_selection(run, selection, texts, figures[selection.name]) for selection in run.selections],
        verdict=run.verdict,
        not_covered=not_covered(run.selections),
        history=history_report(run.history),
        documents=list(run.roles),
        quarantine=run.quarantine if texts else _without_messages(run.quarantine),
        provenance=run.manifest,  # without the hashes of documents, which Provenance leaves to manifest.json
    )


def _model(run: RunFacts) -> ModelReport:
    model, known = run.manifest.config.model, run.manifest.model
    weights = model if isinstance(model, ModelConfig) else None
    fingerprint = json.dumps(run.manifest.fingerprint, sort_keys=True)
    digest = run.manifest.fingerprint.get("model")  # of the weights
    return ModelReport(
        name=model_name(model),
        path=display_name(model),
        revision=None if weights is None else weights.revision,
        adapter=None if weights is None else weights.adapter_shown or None,
        quantization=None if weights is None else weights.quantization,
        architecture=known.architecture,
        dtype=known.dtype if known.chosen is None else f"{known.dtype}, {known.chosen}",
        parameters=known.parameters,
        digest=digest if weights is not None and isinstance(digest, str) else None,
        fingerprint=hashlib.sha256(fingerprint.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        max_tokens=run.manifest.config.max_tokens,
        counted="words" if weights is None else "tokens",
        fine_tuned=fine_tuned(run),
    )


def _selection(
    run: RunFacts, selection: SelectionFacts, texts: bool, figures: Sequence[FigureImage]
) -> SelectionReport:
    answer = answer_text(run, selection)
    return SelectionReport(
        answer=answer,
        brief=brief_answer(selection.summary, answer, model_name(run.manifest.config.model)),
        summary=selection.summary,
        checks=checks(selection.summary),
        figures=[f"figures/{figure.file}" for figure in figures],
        selected=[_with_excerpt(document, texts) for document in selection.documents],
    )


def _with_excerpt(document: SelectedDocument, texts: bool) -> SelectedDocument:
    """How it begins, as it was recorded when it was selected."""
    return document.model_copy(update={"excerpt": (document.excerpt or NOT_AVAILABLE) if texts else None})


def _without_messages(quarantine: QuarantineReport) -> QuarantineReport:
    """Messages of errors may quote a text."""
    examples = [example.model_copy(update={"message": None}) for example in quarantine.examples]
    return quarantine.model_copy(update={"examples": examples})


# --- the page


def _html(store: Store, run: RunFacts, report: Report, figures: Mapping[str, Sequence[FigureImage]]) -> str:
    """The page: everything but the table of documents, and as many of these as there is room for."""
    folders = Folders.of(run.manifest.inputs)
    report = _without_folders(report, folders)
    markup = {name: figure_markup(name, group) for name, group in figures.items()}
    script = page_script() if any(selection.summary.n_selected for selection in run.selections) else ""
    summaries, remark = [entry.summary for entry in report.selections], several_questions(run.history)
    lit = [untested(summary) for summary in summaries]  # what the light of the blind test states
    notes = common_notes(report.selections, [f"{remark} Section 2 lists them."] if remark else [])
    values = {
        "report": report,
        "figures": markup,
        "folders": folders,
        "assumptions": assumptions(summaries),
        "only_clean": bool(summaries) and all(summary.direction == "clean" for summary in summaries),
        "notes": {text: names for text, names in notes.items() if text not in lit},
        "elsewhere": [*notes, *lit],
        "common_lights": common_lights(report.selections),
        "common_checks": common_checks(report.selections),
        "script": script,
        "script_hash": script_hash(f"{script}"),
    }
    drawn = sum(len(one) for group in markup.values() for one in group.values())
    room = max(LEAST_ROOM, PAGE_SIZE - len(script) - drawn - 12_000 * len(summaries))
    listings = read_listings(store, run.selections, folders, report.texts, room)
    return render("report.html", listings=listings, **values)


def _without_folders(report: Report, folders: Folders) -> Report:
    """The report with names relative to their corpus in all its sentences: paths stand under provenance alone."""
    selections = [
        entry.model_copy(
            update={name: _relative(getattr(entry, name), folders) for name in ("answer", "brief", "checks")}
        )
        for entry in report.selections
    ]
    sentences = {name: _relative(getattr(report, name), folders) for name in ("notices", "verdict")}
    return report.model_copy(update={"selections": selections, **sentences})


def _relative(value: Any, folders: Folders) -> Any:
    """A value with every text in it made relative."""
    if isinstance(value, str):
        return folders.without(value)
    if isinstance(value, list):
        return [_relative(one, folders) for one in value]
    if isinstance(value, Record):
        return value.model_copy(update={name: _relative(one, folders) for name, one in value})
    return value


def figure_markup(selection: str, figures: Sequence[FigureImage]) -> dict[str, Markup]:
    """The figures of a selection as the page shows them, by name: `scores`, `p-values` and so on."""
    template = "<figure>\n{image}\n<figcaption><b>{title}.</b> {caption}</figcaption>\n</figure>"
    return {
        figure.file.removeprefix(f"{selection}-").rpartition(".")[0]: Markup(template).format(
            image=figure.image, title=figure.title, caption=visible(figure.caption)
        )
        for figure in figures
    }
