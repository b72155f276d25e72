"""The shuffle check of documents with versions, and which of them are left out because their draws are not independent.

The same functions read a sample of texts before scoring (`seenset plan`, `run`), the score files after it (`run`,
`select`, `verdict`), a bundle (`verify`) and documents in memory (`seenset.select_versions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline.checks.check import Check, Planned, SampleCheck, SampleLine
from pipeline.checks.diagnostic import Diagnostic
from pipeline.checks.document_sample import DocumentSample
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import VersionsConfig
from pipeline.config.kinds import Capability
from pipeline.corpus.draw_features import ChoiceItem, DrawFeatures
from pipeline.corpus.keys import make_excerpt
from pipeline.errors import UserError
from pipeline.run.records import Record
from pipeline.run.scored import Scored, ShardMap
from pipeline.selection.guarantees import Outcome
from pipeline.selection.shuffling import LEAST_DOCUMENTS, DrawCheck, NamingColumn, check_draws
from pipeline.selection.version_draws import DrawTable, IndependentDraws, OptionSet, independent_draws
from pipeline.stages.events import FEATURES, FEATURES_TYPE, VERSIONS
from pipeline.store.receipts import Receipt
from pipeline.wording import short_id

EXAMPLES, CHARACTERS = 3, 60
"""Items that `seenset plan` prints with and without their marks, and characters of their options."""

MARKS_HINT = (
    "Sorted options do this, and marks of places in a form that is not recognised (docs/versions.md): take these out "
    "of the options."
)

INDEX_HINT = "If each list begins with the version that was drawn, state versions.drawn_first: true."

NAMED = 3
"""Sets of options, and failed tests, that a sentence names."""


@dataclass(frozen=True, slots=True)
class VersionDraws:
    """What the texts of documents with versions show of their draws."""

    independent: IndependentDraws
    check: DrawCheck
    diagnostic: ShuffleDiagnostic | None  # None where `seenset mark` drew all published versions

    @property
    def left_out(self) -> frozenset[str]:
        """Ids of the documents that no answer uses."""
        return frozenset(self.independent.left_out)


class ShuffleDiagnostic(Diagnostic):
    """Whether published orders or versions look drawn at random, from texts alone."""

    documents: int = Field(description="Documents that were compared.")
    left_out: int = Field(
        description="Documents that no answer uses: their draws are not independent of others, or marks of their "
        "options do not stand in place."
    )
    tests: int = Field(description="Tests that were made.")
    feature: str | None = Field(None, description="What the test nearest to its limit counted; null for no test.")
    p_value: float | None = Field(None, description="Its exact p-value; null for no test.")
    limit: float | None = Field(None, description="The p-value below which it contradicts the draw; null for no test.")


def version_draws(table: DrawTable | None, versions: VersionsConfig, near_copies: float) -> VersionDraws:
    """The independent documents among some, and their shuffle check.

    Args:
        table: features of all documents; None where `seenset mark` drew them.
        versions: settings of the versions.
        near_copies: smallest share of common runs of near-duplicates.
    """
    independent = independent_draws(table, near_copies)
    if table is None:
        return VersionDraws(independent, DrawCheck(0), None)
    used = table.take(np.array([name not in independent.left_out for name in table.ids], dtype=bool))
    check = check_draws(used, versions.drawn_first, versions.companions if versions.template else ())
    return VersionDraws(independent, check, _diagnostic(table, independent, check))


def read_version_draws(config: AuditConfig, scored: Scored, each: ShardMap) -> VersionDraws:
    """`version_draws` of the scored documents of a run."""
    versions = config.corpus.versions
    assert versions is not None

    def part_of(receipt: Receipt) -> DrawTable:
        return draw_table(scored.table(receipt, ["doc_id", VERSIONS, FEATURES]))

    return version_draws(DrawTable.joined(list(each(scored.of("audit"), part_of))), versions, config.near_copies)


def draw_table(table: pa.Table) -> DrawTable:
    """The features in a table with doc_id, `VERSIONS` and `FEATURES`."""
    versions, features = (table[name].combine_chunks() for name in (VERSIONS, FEATURES))
    sizes = pc.binary_length(pc.struct_field(versions, "digests")).to_numpy(zero_copy_only=False) // 32
    published = pc.struct_field(versions, "published").to_numpy(zero_copy_only=False)
    return DrawTable.of(table["doc_id"].to_pylist(), published.astype(np.int64), sizes.astype(np.int64), features)


def table_in_memory(ids: Sequence[str], drawn: Sequence[tuple[int, int, DrawFeatures]]) -> DrawTable | None:
    """The features of documents in memory.

    Args:
        ids: one per document.
        drawn: index of the published version, number of versions, and features of each document.
    """
    rows: list[dict[str, Any]] = [features.row() for _, _, features in drawn]
    indices, sizes = (np.array([one[place] for one in drawn], dtype=np.int64) for place in (0, 1))
    return DrawTable.joined([DrawTable.of(ids, indices, sizes, pa.array(rows, FEATURES_TYPE))])


# --- before scoring


class DrawsPreview(Record):
    """The shuffle check of documents with versions before scoring."""

    shuffle: ShuffleDiagnostic = Field(description="The check of the documents that were read.")
    lines: list[str] = Field(
        description="Marks that were taken off, items with the same options, and columns to leave out."
    )
    warnings: list[str] = Field([], description="Columns of the template that name the right answer.")
    used: int = Field(description="Documents that an answer can use.")


def preview_draws(sample: DocumentSample) -> DrawsPreview | None:
    """The check of the documents that were read; None without documents that have features."""
    config, drawn = sample.config, sample.drawn
    if config.corpus.versions is None:
        return None
    numbers = [(one.published, one.versions, one.features) for one in drawn.values()]
    draws = version_draws(table_in_memory(list(drawn), numbers), config.corpus.versions, config.near_copies)
    if draws.diagnostic is None:
        return None
    items = {name: one.item for name, one in drawn.items() if one.item is not None}
    named = [column for column in draws.check.naming if column.in_template and not column.states_place]
    return DrawsPreview(
        shuffle=draws.diagnostic,
        lines=[*_marked(items), *_sets(items, draws.independent)],
        warnings=[naming_sentence(column, draws.check.documents) for column in named],
        used=len(drawn) - len(draws.left_out),
    )


def _marked(items: Mapping[str, ChoiceItem]) -> list[str]:
    """How many items lose marks, and three of them."""
    marked = [(name, item, marks) for name, item in items.items() if (marks := item.marks) is not None]
    if not marked:
        return []
    lines = [
        f"{len(marked):,} of {len(items):,} items have marks of places before their options, which stay in "
        "place while options move (versions.marks: none keeps them with their options):"
    ]
    for name, item, marks in marked[:EXAMPLES]:
        before, after = (make_excerpt(" | ".join(texts), CHARACTERS) for texts in (item.options, marks.bare))
        lines.append(f"  {short_id(name)}: {before} -> {after}")
    return lines


def _sets(items: Mapping[str, ChoiceItem], independent: IndependentDraws) -> list[str]:
    """The largest sets of items with the same options, by their texts."""
    lines = []
    for one in _largest(independent.sets):
        texts = make_excerpt(" | ".join(sorted(items[one.used].bare)), CHARACTERS)
        how = "all are used, as their orders look shuffled" if one.all_used else "one is used"
        lines.append(f"{one.items:,} items have the options {texts}: {how} (p = {one.p_value:.2g})")
    return lines


def _lines(result: DrawsPreview | None, planned: Planned) -> list[SampleLine]:
    if result is None:
        return []
    shuffle = result.shuffle
    noted = shuffle.outcome == Outcome.PASSED and shuffle.left_out > 0
    return [SampleLine(Outcome.INCONCLUSIVE if noted else shuffle.outcome, shuffle.sentence)]


def _about_inputs(result: DrawsPreview | None) -> list[SampleLine]:
    if result is None:
        return []
    stated = [SampleLine(Outcome.PASSED, line) for line in result.lines]
    return [*stated, *(SampleLine(Outcome.FAILED, line) for line in result.warnings)]


def _refuse(result: DrawsPreview | None, read: Planned) -> UserError | None:
    if result is None or result.used or not read.whole:
        return None
    return UserError(f"no document has a draw of its own: {result.shuffle.sentence}")


# --- sentences


def _diagnostic(table: DrawTable, independent: IndependentDraws, check: DrawCheck) -> ShuffleDiagnostic:
    failed, stating = check.failed(), [column for column in check.naming if column.states_place]
    least = min(check.tests, key=lambda test: test.p_value / check.limit(test.first), default=None)
    outcome = Outcome.FAILED if failed or stating else Outcome.INCONCLUSIVE if least is None else Outcome.PASSED
    return ShuffleDiagnostic(
        outcome=outcome,
        sentence=" ".join([*_findings(table, check), *left_out_sentences(table, independent)]),
        documents=check.documents,
        tests=len(check.tests),
        feature=None if least is None else least.about,
        p_value=None if least is None else least.p_value,
        limit=None if least is None else check.limit(least.first),
        left_out=len(independent.left_out),
    )


def _findings(table: DrawTable, check: DrawCheck) -> list[str]:
    """The result of the check in sentences."""
    compared = count_noun(check.documents, "item" if table.permuted else "document")
    drawn = "orders" if table.orders.shape[1] else "versions"
    failed = check.failed()
    lines = [naming_sentence(column, check.documents) for column in check.naming if column.states_place]
    if failed:
        shown = "; ".join(f"{test.about} (p = {test.p_value:.2g})" for test in failed[:NAMED])
        more = f"; {len(failed) - NAMED:,} more tests contradict it" if len(failed) > NAMED else ""
        source = "texts" if table.orders.shape[1] else "texts and indices"
        lines.insert(0, f"The published {drawn} were not drawn at random, as {source} alone show: {shown}{more}.")
        if table.permuted and failed[0].about.startswith("options "):
            lines.append(MARKS_HINT)
        if not table.orders.shape[1] and not table.published.any() and any(test.first for test in failed):
            lines.append(INDEX_HINT)
    elif not check.tests:
        lines.append(
            f"Whether the published {drawn} were drawn at random was not checked: {compared} can be compared, and a "
            f"test takes {LEAST_DOCUMENTS}."
        )
    elif not lines:
        least = min(test.p_value for test in check.tests)
        lines.append(
            f"Nothing in the texts shows which {drawn} were published ({compared}, "
            f"{count_noun(len(check.tests), 'test')}, smallest p = {least:.2g})."
        )
    return lines


def naming_sentence(column: NamingColumn, items: int) -> str:
    """States that a column names the right answer, and what to do.

    Args:
        column: a column of the template, or the texts of all of them.
        items: number of items.
    """
    share = f"in {column.items:,} of {count_noun(items, 'item')}"
    if not column.name:
        return (
            f"The texts of the template state an option by its {column.by}, such as 'Answer: B', {share}; that does "
            "not move with the options: take it out of the texts."
        )
    if not column.sure:
        return (
            f"Column {column.name!r} of the template holds the number of an option {share}: if these are the right "
            f"answers, leave {{{column.name}}} out of versions.template."
        )
    head = f"Column {column.name!r} of the template names an option by its {column.by} {share}"
    fixed = ", which does not move with the options" if column.states_place else ""
    return f"{head}{fixed}, as a column of right answers does: leave {{{column.name}}} out of versions.template."


def left_out_sentences(table: DrawTable, independent: IndependentDraws) -> list[str]:
    """Which documents are left out, and why; with ids only."""
    lines, noun = [], "item" if table.permuted else "document"
    if (out := independent.out_of_place) > 0:
        have, are = ("has", "is") if out == 1 else ("have", "are")
        some = "the items with marks are" if independent.misplaced > out else f"{'it' if out == 1 else 'these'} {are}"
        lines.append(
            f"{out:,} of {count_noun(independent.marked, 'item')} with marks such as (A) {have} one that does not "
            f"stand in its place: {some} left out (versions.marks: none if these are no marks)."
        )
    if independent.repeated:
        are = "is" if independent.repeated == 1 else "are"
        lines.append(
            f"{count_noun(independent.repeated, noun)} {are} left out as equal to another one or nearly equal to it."
        )
    reduced = [one for one in independent.sets if not one.all_used]
    if reduced:
        items = sum(one.items - 1 for one in reduced)
        are = "is" if items == 1 else "are"
        names = "; ".join(f"{one.items:,} with those of {short_id(one.used)}" for one in _largest(reduced))
        lines.append(f"{count_noun(items, 'item')} {are} left out because others have the same options ({names}).")
    whole = [one for one in independent.sets if one.all_used]
    if whole:
        names = "; ".join(f"{one.items:,} with those of {short_id(one.used)}" for one in _largest(whole))
        lines.append(f"Items with the same options are all used where their orders look shuffled ({names}).")
    return lines


def count_noun(count: int, noun: str) -> str:
    """A count with its noun, such as "2 items"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _largest(sets: Sequence[OptionSet]) -> list[OptionSet]:
    return sorted(sets, key=lambda one: (-one.items, one.used))[:NAMED]


AS_DRAWN = (
    "Take out of the texts what the shuffle check names, audit only documents whose published order or version was "
    "drawn at random, or mark what you publish from now on with seenset mark."
)
"""After a shuffle check that failed."""

CHECK = Check(
    name="shuffle",
    title="Shuffle check",
    record=ShuffleDiagnostic,
    description=(
        "Whether the published versions look drawn at random; left out for documents without versions and for those"
        " that seenset mark drew."
    ),
    absent="left out",
    place=12,
    needs=frozenset({Capability.VERSIONS}),
    on_scores=lambda facts: facts.shuffle,
    sample=SampleCheck(
        "draws",
        DrawsPreview | None,
        "The shuffle check of documents with versions; left out for others.",
        preview_draws,
        _lines,
        about_inputs=_about_inputs,
        refuse=_refuse,
        empty=None,
    ),
    finding=version_draws,
    next=lambda diagnostic, role: AS_DRAWN,
    recomputed=True,
)
