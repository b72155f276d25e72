"""The content of a report, for report.json and for the page.

Models and documents are named without the folders of the machine of the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from pydantic import Field, JsonValue

from pipeline.answers.verdict import CollectionVerdict
from pipeline.config.models import AnyModel, ModelConfig, display_name
from pipeline.corpus.formats import format_named
from pipeline.results.summary import Summary
from pipeline.run.conclusion import Concluded
from pipeline.run.manifest import InputRecord, Provenance
from pipeline.run.records import Record, VersionedRecord
from pipeline.selection.guarantees import ConclusionValue

CheckVerdict = Literal["failed", "inconclusive", "limited", "passed", "noted"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CACHED = re.compile(r"models--(.+?)--(.+?)/snapshots/[^/]+/?$")


class AnswerText(Record):
    """The answer of one selection in sentences: the count, the guarantee, and its limitations."""

    sentence: str = Field(description="The complete answer in one line, for copying.")
    headline: str = Field(
        description="Number of selected documents, and of how many; a contradiction by a check is stated first."
    )
    bound: str | None = Field(
        None,
        description="How many of all audited documents are members (with direction clean, non-members) at least, with "
        "a stated confidence; null where no theorem bounds it.",
    )
    terms: str = Field(description="How many of them may be wrong on average, and the assumption.")
    doubts: list[str] = Field(description="Failed checks: the guarantee may not hold.")
    cautions: list[str] = Field(description="Further cautions for reading the numbers.")


class ShownCheck(Record):
    """One diagnostic on the page."""

    name: str = Field(description="Name of the diagnostic.")
    title: str = Field(description="Its subject, as a short phrase; the verdict and the sentence give the result.")
    verdict: CheckVerdict = Field(
        description="failed: the guarantee may not hold; inconclusive: the blind test decided nothing or was not made; "
        "limited: it reduces what can be found; passed; or noted."
    )
    sentence: str = Field(description="The check and its result.")


class Light(Record):
    """One diagnostic in brief."""

    name: str = Field(description="Name of the diagnostic.")
    label: str = Field(description="Its subject, as a short phrase.")
    colour: Literal["red", "amber", "grey", "green"] = Field(
        description="red: failed; amber: not known, or it reduces what can be found; grey: for information; green: "
        "passed."
    )
    reason: str | None = Field(description="Why it is not green; null where it is.")


class BriefAnswer(Record):
    """The answer of one selection on the first screen, in sentences of one line each."""

    question: str = Field(description="The question, and its detectors.")
    selected: str = Field(description="Number of selected documents, and of how many.")
    bound: str = Field(description="At most how many of them are wrong, or that no bound is stated.")
    conclusion: ConclusionValue = Field(description="The conclusion of the checks, as in `summary`.")
    reason: str | None = Field(description="Why it is contradicted or inconclusive; null where it is supported.")
    claim: str = Field(description="What was selected; a contradiction of the guarantee is stated first.")
    condition: str = Field(description="Condition of the next three sentences, or that nothing is guaranteed.")
    average: str = Field(description="The guarantee on average over audits.")
    this_list: str = Field(description="The guarantee for this one list.")
    collection: str = Field(description="The guarantee for all audited documents.")
    drawn: str | None = Field(
        None,
        exclude_if=lambda drawn: drawn is None,
        description="How the list depends on the numbers that smooth the ranks; left out where ranks are whole.",
    )
    weights: str | None = Field(
        None,
        exclude_if=lambda weights: weights is None,
        description="How a learnt score, or the weights of groups, came about; left out where there are none.",
    )
    lights: list[Light] = Field(description="The diagnostics in brief, red ones first.")


class SelectedDocument(Record):
    """One selected document."""

    doc_id: str = Field(description="Its id.")
    p_value: float = Field(description="P-value in (0, 1]: how often calibration documents have evidence as strong.")
    conformal_rank: int | None = Field(
        None,
        exclude_if=lambda rank: rank is None,
        description="Its rank among the calibration documents, from 1; left out where ranks are whole.",
    )
    smoothed_p: float | None = Field(
        None,
        exclude_if=lambda p: p is None,
        description="Its p-value by the smoothed rank, which decided; left out where ranks are whole.",
    )
    scores: dict[str, float | None] = Field(description="Its scores by detector; null where not finite.")
    source: str = Field(description="The input that contains it.")
    row: int = Field(description="Its row in the input, from 0.")
    excerpt: str | None = Field(None, description="Beginning of its text; null where texts are left out.")


class SelectionReport(Record):
    """One selection: its answer, its numbers and its first documents."""

    answer: AnswerText = Field(description="The answer in sentences.")
    brief: BriefAnswer = Field(description="The answer in brief.")
    summary: Summary = Field(description="The numbers, as in summary.json.")
    checks: list[ShownCheck] = Field(description="The diagnostics, failed ones first.")
    figures: list[str] = Field(description="Files of its figures, below report/.")
    selected: list[SelectedDocument] = Field(description="The first selected documents, smallest p-value first.")


class PastQuestion(Concluded):
    """One question of the run's history, for the page."""

    asking: int = Field(description="Number of the request, from 1; a request may have several questions.")
    name: str = Field(description="Name of the selection.")
    settings: dict[str, JsonValue] = Field(description="Its settings, with every default.")
    others: str = Field(description="Those that differ from the default and have no column of their own.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")
    n_selected: int = Field(description="Documents selected.")


class HistoryReport(Record):
    """All questions of the run, and the effect of several questions on a guarantee."""

    n_questions: int = Field(description="Number of different questions, regardless of their names.")
    n_askings: int = Field(description="Lines of selection/history.jsonl: the number of requests with something new.")
    sentences: list[str] = Field(description="The effect of several questions on the guarantee of an answer.")
    last_asked_by: str = Field(description="run or select: the command of the current answers.")
    questions: list[PastQuestion] = Field(description="The last questions, in the order of the requests.")


class ModelReport(Record):
    """The audited model."""

    name: str = Field(description="Its name in the answers.")
    path: str = Field(description="Hub id, folder or file; name and address of an endpoint.")
    revision: str | None = Field(description="Revision on the hub, if one was requested.")
    adapter: str | None = Field(description="Adapter that was merged into it, if any.")
    quantization: str | None = Field(description="How its weights were quantised, if they were.")
    architecture: str = Field(description="Class of the model.")
    dtype: str = Field(description="Arithmetic of its weights.")
    parameters: int | None = Field(description="Number of parameters; null where only loading determines it.")
    digest: str | None = Field(
        None,
        description="SHA-256 over its weights and configuration, and over the adapter's; null where it is not known, "
        "as of an endpoint.",
    )
    fingerprint: str = Field(description="Short digest of all values that could change a score.")
    max_tokens: int = Field(description="Maximum length of a text, or of each of its windows; longer texts are cut.")
    windows: int = Field(1, description="Maximum number of windows of a text.")
    counted: Literal["tokens", "words"] = Field(description="Unit of that length.")
    requests: list[str] = Field([], description="Parameters of requests that an endpoint refuses, with the effect.")
    fine_tuned: dict[str, str] = Field(description="Training documents of adapters of the fsd detector, by name.")


class RoleCount(Record):
    """Numbers of documents of one role: read, scored and quarantined."""

    role: str = Field(description="audit, unseen or seen.")
    n_in: int = Field(description="Documents read.")
    n_scored: int = Field(description="Documents that have scores.")
    n_quarantined: int = Field(description="Documents that could not be scored.")
    n_judged: int = Field(0, description="Documents left out because earlier runs have audited them (`against`).")
    n_truncated: int = Field(description="Scored documents that were cut to max_tokens.")
    tokens: int = Field(description="Tokens read.")
    digest: str | None = Field(
        None,
        description="SHA-256 over the SHA-256 digests of its shards, each over ids and texts as they were read, in the "
        "order of the shards; null where a shard is not scored.",
    )


class QuarantinedDocument(Record):
    """One document that could not be scored."""

    doc_id: str | None = Field(description="Its id.")
    role: str | None = Field(description="Its role.")
    source: str | None = Field(description="The input that contains it.")
    row: int | None = Field(description="Its row in the input, from 0.")
    stage: str | None = Field(description="The stage that could not read it.")
    reason: str = Field(description="The reason, one of a fixed set of words.")
    message: str | None = Field(description="The reason as a sentence; null where texts are left out.")


class QuarantineReport(Record):
    """Documents that could not be scored."""

    reasons: dict[str, dict[str, int]] = Field(description="Counts by reason and role, frequent reasons first.")
    examples: list[QuarantinedDocument] = Field(description="A few documents of every reason.")


class Report(VersionedRecord):
    """The content of the report of a run: `report/report.json`."""

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    run: str = Field(description="The run directory.")
    limit: int | None = Field(description="The most documents of each role that were read; null when all were.")
    texts: bool = Field(description="Whether texts of documents are shown.")
    answered_at: str | None = Field(
        None,
        description="When the answers were first given, in UTC, as selection/history.jsonl records it; null where it "
        "records none.",
    )
    notices: list[str] = Field(description="Cautions that precede the first answer.")
    model: ModelReport = Field(description="The audited model.")
    selections: list[SelectionReport] = Field(description="The answers, in the order of the configuration.")
    verdict: CollectionVerdict | None = Field(
        None, description="Whether the collection was trained on; null where seenset verdict was not run."
    )
    not_covered: list[str] = Field(description="Limits of the guarantee.")
    history: HistoryReport | None = Field(description="The questions of the run so far; null where none are recorded.")
    documents: list[RoleCount] = Field(description="Numbers of documents by role.")
    quarantine: QuarantineReport = Field(description="Documents that could not be scored.")
    provenance: Provenance = Field(description="The origin of the scores.")


def model_name(model: AnyModel) -> str:
    """The name of the audited model: its configured name where there are no weights, a hub id, or the end of a path."""
    if not isinstance(model, ModelConfig):
        return model.name
    name = _last_part(model.path, display_name(model)) + (f" ({model.gguf_file})" if model.gguf_file else "")
    adapter = model.adapter_shown
    return f"{name} with adapter {_last_part(str(model.adapter), adapter)}" if adapter else name


def run_names(first: str, second: str) -> tuple[str, str]:
    """Two run directories by the last parts of their paths, as many as distinguish them."""
    parts = [path.rstrip("/").split("/") for path in (first, second)]
    last = 1
    while parts[0][-last:] == parts[1][-last:] and last < max(map(len, parts)):
        last += 1
    return "/".join(parts[0][-last:]), "/".join(parts[1][-last:])


def _last_part(path: str, shown: str) -> str:
    """The last part of a path of this machine or of a store; a hub id as it is."""
    if cached := _CACHED.search(path):
        return "/".join(cached.groups())
    local = os.path.isabs(path) or _URL.match(path) or path.startswith(".")
    return os.path.basename(shown.rstrip("/")) or shown if local else shown


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a run's inputs, which are removed from the names on its page."""

    prefixes: tuple[str, ...]  # longest first; each ends with a slash

    @classmethod
    def find(cls, inputs: Iterable[InputRecord]) -> Folders:
        """The longest common folder of the inputs of each role; where that is the root, the folder of each input."""
        names: dict[str, list[str]] = {}
        for entry in inputs:
            if format_named(entry.format).has_path:
                names.setdefault(entry.role, []).append(entry.name)
        folders = {common_folder(group) for group in names.values()}
        folders |= {
            f"{os.path.dirname(name)}/" for group in names.values() if common_folder(group) == "/" for name in group
        }
        return cls(tuple(sorted(folders - {"", "/"}, key=lambda folder: (-len(folder), folder))))

    def relative(self, name: str) -> str:
        """The id of a document or the name of an input, relative to its corpus."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
        return name[len(prefix) :]

    def without(self, text: str) -> str:
        """A message with file names relative to their corpus."""
        for prefix in self.prefixes:
            if prefix.startswith("/") or "://" in prefix:
                text = text.replace(prefix, "")
        return text


def common_folder(names: Iterable[str]) -> str:
    """The longest folder of all of them, with a slash at its end; empty where there is none."""
    folders = [name.split("/")[:-1] for name in names]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return "".join(f"{parts[0]}/" for parts in common)
