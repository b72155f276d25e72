"""Write the report: one self-contained HTML page, the same facts as JSON, and the figures as files.

The page carries the top selected documents of each selection, compressed, in bounded memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from markupsafe import Markup

from pipeline.answers.top_documents import TokenAttributions, read_attributions, read_thumbnails
from pipeline.checks.blind import untested_note
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.config.models import ModelConfig, display_name
from pipeline.corpus.reasons import Reason
from pipeline.errors import DamagedError, visible
from pipeline.report.brief import (
    assumptions,
    brief_answer,
    checks,
    common_checks,
    common_lights,
    common_notes,
    next_steps,
)
from pipeline.report.contents import (
    Folders,
    ModelReport,
    QuarantineReport,
    Report,
    SelectedDocument,
    SelectionReport,
    model_name,
)
from pipeline.report.facts import NOT_SCORES, RunFacts, SelectionFacts, finite, first_selected, read_facts
from pipeline.report.figures import draw_figures
from pipeline.report.selection_text import (
    answer_text,
    fine_tuned_notes,
    history_report,
    not_covered,
    page_notices,
)
from pipeline.report.templates import FigureImage, page_script, render, script_hash
from pipeline.results.history import several_questions
from pipeline.run.manifest import refused_parameters
from pipeline.run.records import Record
from pipeline.store.files import Store

NOT_AVAILABLE = "text not available"
PAGE_SIZE = 4_800_000
"""Maximum number of characters of a page, unless its figures leave less than `LEAST_ROOM` for the documents."""
LEAST_ROOM = 500_000

MAX_ROWS = 20_000
"""Maximum number of documents on a page, over all of its selections."""

_ATTRIBUTIONS = 0.35  # share of the characters for tokens
_DIGITS = 6


def write_report(store: Store, texts: bool = True) -> str:
    """Write report/report.html, report/report.json and report/figures/*.svg from the run directory alone.

    Figures of removed selections are deleted. The same run directory gives the same bytes, and leaves files that have
    them untouched.

    Args:
        store: the run directory.
        texts: whether excerpts of the first selected documents are shown; without them no document's text, nor an
            error message that may quote one, is written anywhere under report/.

    Returns:
        The path or URL of report.html.

    Raises:
        UserError: not a run directory, a damaged file in it, or one of another version.
    """
    run = read_facts(store)
    figures = {selection.name: draw_figures(selection) for selection in run.selections}
    report = _report(run, texts, figures)
    drawn, store = [figure for group in figures.values() for figure in group], store.keeping()
    for figure in drawn:
        store.write(f"report/figures/{figure.file}", figure.svg)
    for name in store.names("report/figures"):
        if name not in {figure.file for figure in drawn}:
            store.remove(f"report/figures/{name}")
    store.write_json("report/report.json", report.plain())
    store.write("report/report.html", _html(store, run, report, figures).encode("utf-8", "replace"))
    return f"{store.url}/report/report.html"


def rewrite_report(store: Store) -> None:
    """Write an existing report again, with texts or without them as before.

    Raises:
        DamagedError: the existing report does not state whether it shows texts.
        UserError: the errors of `write_report`.
    """
    name, remedy = "report/report.json", f"seenset report {store.url} writes it again"
    try:
        earlier = store.read_json(name)
    except DamagedError as error:
        raise error.with_remedy(remedy) from None
    if earlier is None:
        return
    texts = earlier.get("texts") if isinstance(earlier, dict) else None
    if not isinstance(texts, bool):
        fault = "is damaged: it does not state whether texts are shown"
        raise DamagedError(f"{store.url}/{name}", fault, remedy)
    write_report(store, texts)


# --- contents


def _report(run: RunFacts, texts: bool, figures: dict[str, list[FigureImage]]) -> Report:
    """All content of the page; without texts, no text of a document."""
    return Report(
        run=run.url,
        limit=run.manifest.limit,
        texts=texts,
        answered_at=run.history[-1].when if run.history else None,
        notices=page_notices(run, texts),
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
    digest = run.manifest.fingerprint.get("model")  # digest of the weights
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
        windows=run.manifest.config.windows,
        counted="words" if weights is None else "tokens",
        requests=refused_parameters(run.manifest.models),
        fine_tuned=fine_tuned_notes(run),
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
    """The document with the recorded beginning of its text, or without it."""
    return document.model_copy(update={"excerpt": (document.excerpt or NOT_AVAILABLE) if texts else None})


def _without_messages(quarantine: QuarantineReport) -> QuarantineReport:
    """The quarantine without messages of errors, which may quote a text."""
    examples = [example.model_copy(update={"message": None}) for example in quarantine.examples]
    return quarantine.model_copy(update={"examples": examples})


# --- the page


def _html(store: Store, run: RunFacts, report: Report, figures: Mapping[str, Sequence[FigureImage]]) -> str:
    """The page: everything except the table of documents, and as many of these as the size limit allows."""
    folders = Folders.find(run.manifest.inputs)
    report = _without_folders(report, folders)
    markup = {name: figure_markup(name, group) for name, group in figures.items()}
    script = page_script() if any(selection.summary.n_selected for selection in run.selections) else ""
    summaries, remark = [entry.summary for entry in report.selections], several_questions(run.history)
    blind = [summary.diagnostics.result(BlindDiagnostic) for summary in summaries]
    lit = [untested_note(one) for one in blind]  # the text of the light of the blind test
    notes = common_notes(report.selections, [f"{remark} Section 2 lists them."] if remark else [])
    values = {
        "report": report,
        "figures": markup,
        "folders": folders,
        "assumptions": assumptions(summaries),
        "only_clean": bool(summaries) and all(summary.direction == "clean" for summary in summaries),
        "notes": {text: names for text, names in notes.items() if text not in lit},
        "elsewhere": [*notes, *lit],
        "next_steps": next_steps(summaries),
        "common_lights": common_lights(report.selections),
        "common_checks": common_checks(report.selections),
        "reasons": {reason: reason.sentence for reason in Reason},
        "script": script,
        "script_hash": script_hash(f"{script}"),
    }
    drawn = sum(len(one) for group in markup.values() for one in group.values())
    room = max(LEAST_ROOM, PAGE_SIZE - len(script) - drawn - 12_000 * len(summaries))
    listings = read_listings(store, run.selections, folders, report.texts, room)
    return render("report.html", listings=listings, **values)


def _without_folders(report: Report, folders: Folders) -> Report:
    """The report with names relative to their corpus in all sentences; only provenance has full paths."""
    selections = [
        entry.model_copy(
            update={name: _relative(getattr(entry, name), folders) for name in ("answer", "brief", "checks")}
        )
        for entry in report.selections
    ]
    sentences = {name: _relative(getattr(report, name), folders) for name in ("notices", "verdict")}
    return report.model_copy(update={"selections": selections, **sentences})


def _relative(value: Any, folders: Folders) -> Any:
    """A value with all of its texts made relative."""
    if isinstance(value, str) and not isinstance(value, StrEnum):  # a word of a fixed set holds no path
        return folders.without(value)
    if isinstance(value, list):
        return [_relative(one, folders) for one in value]
    if isinstance(value, Record):
        return value.model_copy(update={name: _relative(one, folders) for name, one in value})
    return value


def figure_markup(selection: str, figures: Sequence[FigureImage]) -> dict[str, Markup]:
    """The figures of a selection in the markup of the page, by name, such as `scores` and `p-values`."""
    template = "<figure>\n{image}\n<figcaption><b>{title}.</b> {caption}</figcaption>\n</figure>"
    return {
        figure.file.removeprefix(f"{selection}-").rpartition(".")[0]: Markup(template).format(
            image=figure.image, title=figure.title, caption=visible(figure.caption)
        )
        for figure in figures
    }


@dataclass(frozen=True, slots=True)
class Listing:
    """The top selected documents of one selection, for the table of the page.

    `rows` and `attributions` are base64 of gzip of lines of JSON: a line of `rows` has the columns of some hundred
    documents, a line of `attributions` the tokens of one document.
    """

    rows: str
    attributions: str
    n_rows: int
    n_attributions: int
    sources: bool  # whether the documents come from several inputs


def read_listings(
    store: Store, selections: Sequence[SelectionFacts], folders: Folders, texts: bool, room: int
) -> dict[str, Listing]:
    """The listings of all selections by name; together at most `MAX_ROWS` documents.

    Args:
        store: the run directory.
        selections: selections of the run.
        folders: folders of the inputs, which are omitted from ids.
        texts: whether texts of documents may be on the page.
        room: maximum number of characters of all listings.

    Raises:
        UserError: a list of selected documents that cannot be read.
    """
    limits = even_shares([selection.summary.n_selected for selection in selections], MAX_ROWS)
    listings: dict[str, Listing] = {}
    for served, (selection, limit) in enumerate(zip(selections, limits, strict=True)):
        part = room // (len(selections) - served)  # unused characters go to the next ones
        listing = _listing(store, selection, folders, texts, limit, part)
        listings[selection.name] = listing
        room -= len(listing.rows) + len(listing.attributions)
    return listings


def even_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Share a total among several sizes: each gets its size, or a share at least as large as any other's."""
    shares = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=lambda index: sizes[index])
    for served, index in enumerate(smallest_first):
        shares[index] = min(sizes[index], total // (len(sizes) - served))
        total -= shares[index]
    return shares


def _listing(store: Store, selection: SelectionFacts, folders: Folders, texts: bool, limit: int, room: int) -> Listing:
    attributions = read_attributions(store, selection.name)
    room_of_tokens = int(_ATTRIBUTIONS * room) if attributions else 0
    rows, tokens, places = _Packed(room - room_of_tokens), _Packed(room_of_tokens), dict[str, int]()
    thumbnails = read_thumbnails(store, selection.name) if texts else {}
    n_rows = n_attributions = 0
    for batch in (some.to_pydict() for some in first_selected(store, selection.name, limit, texts)):
        columns = _columns(batch, places, folders, texts)
        pictured = {**columns, "thumbs": _thumbnails(batch, thumbnails)} if thumbnails else columns
        if not (rows.add(pictured) or rows.add(columns)):
            break
        for index, doc_id in enumerate(batch["doc_id"]):
            if doc_id in attributions and tokens.add(_tokens(n_rows + index, attributions[doc_id], folders, texts)):
                n_attributions += 1
        n_rows += len(batch["doc_id"])
    return Listing(rows.text(), tokens.text(), n_rows, n_attributions, len(places) > 1)


def _columns(batch: Mapping[str, list[Any]], places: dict[str, int], folders: Folders, texts: bool) -> dict[str, Any]:
    """Some hundred documents in the form that the page's script reads; an id that only states the place is left out.

    Args:
        batch: columns of the documents.
        places: numbers of the inputs, in order of occurrence; new ones are added.
        folders: folders of the inputs.
        texts: whether texts are on the page.
    """
    met = len(places)
    where = [places.setdefault(str(source), len(places)) for source in batch["source"]]
    default = [f"{source}#{row}" for source, row in zip(batch["source"], batch["row"], strict=True)]
    ids = [
        None if doc_id == other else visible(folders.relative(str(doc_id)))
        for doc_id, other in zip(batch["doc_id"], default, strict=True)
    ]
    scores = {name: list(map(_short, values)) for name, values in batch.items() if name not in NOT_SCORES}
    deciding = {"p_value": "p-value"}
    if "smoothed_p" in batch:  # the others are shown before the scores
        deciding = {"smoothed_p": "smoothed p", "conformal_rank": "conformal rank", **deciding}
    (p_name, p), *others = ((title, list(map(_short, batch[name]))) for name, title in deciding.items())
    scores = {**dict(others), **scores}
    columns = {
        "ids": ids,
        "p": p,
        "p_name": p_name,
        "scores": scores,
        "source": where,
        "row": batch["row"],
        "sources": [visible(folders.relative(source)) for source in list(places)[met:]],
    }
    if texts:
        columns["text"] = [visible(text or "") for text in batch.get("excerpt") or [None] * len(ids)]
    return columns


def _thumbnails(batch: Mapping[str, list[Any]], thumbnails: Mapping[tuple[str, int], bytes]) -> list[str | None]:
    """Base64 of the thumbnail of each document; None where it has none."""
    files = (thumbnails.get(place) for place in zip(batch["source"], batch["row"], strict=True))
    return [None if data is None else base64.b64encode(data).decode("ascii") for data in files]


def _short(value: float | None) -> float | None:
    """A number with as many digits as a reader can use."""
    known = finite(value)
    return None if known is None else float(f"{known:.{_DIGITS}g}")


def _rounded(value: float | None) -> float | None:
    known = finite(value)
    return None if known is None else round(known, 2)


def _tokens(index: int, shown: TokenAttributions, folders: Folders, texts: bool) -> dict[str, Any]:
    """Token values of the document with an index on the page; without texts, no token and no value."""
    tokens: dict[str, Any] = {
        "at": index,
        "kind": shown.kind,
        "detector": shown.detector,
        "by": shown.ranked_by,
        "score": _short(shown.score),
        "copies": [visible(folders.relative(doc_id)) for doc_id in shown.near_copies],
    }
    if texts:
        tokens["pieces"] = [visible(piece) for piece in shown.pieces or [shown.text]]
        tokens["values"] = [_rounded(value) for value in shown.values]
    return tokens


class _Packed:
    """Lines of JSON, compressed as they are added, in a limited number of characters."""

    def __init__(self, room: int) -> None:
        self.room = 3 * room // 4 - 64  # base64 takes four characters for three bytes
        self._pack = zlib.compressobj(6, zlib.DEFLATED, 31)  # gzip, without a time: the same lines give the same bytes
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, value: Any) -> bool:
        """Add a line if it fits; returns whether it did."""
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
        tried = self._pack.copy()
        part = tried.compress(line.encode("utf-8", "replace")) + tried.flush(zlib.Z_SYNC_FLUSH)
        if self._size + len(part) > self.room:
            return False
        self._pack = tried
        self._parts.append(part)
        self._size += len(part)
        return True

    def text(self) -> str:
        """Base64 of the gzip file."""
        return base64.b64encode(b"".join([*self._parts, self._pack.copy().flush()])).decode("ascii")
