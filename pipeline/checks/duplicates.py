"""Documents that repeat an id: they are quarantined and count with p = 1, which leaves the guarantee intact."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from pipeline.checks.check import AnswerFacts, Check, Planned, SampleCheck, SampleLine
from pipeline.checks.diagnostic import CountDiagnostic
from pipeline.checks.document_sample import DocumentSample
from pipeline.corpus.formats import distinguishing_column
from pipeline.corpus.known_texts import repeated_ids
from pipeline.corpus.reasons import Reason
from pipeline.selection.guarantees import Outcome
from pipeline.wording import documents, short_id, was

EXAMPLES = 3
"""Maximum number of ids that a plan names."""


def duplicates_diagnostic(facts: AnswerFacts) -> CountDiagnostic:
    """The number of scored documents that repeat an id."""
    if facts.scored is None:
        untested = "Whether documents repeat an id was not tested."
        return CountDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence=untested, count=0)
    count = sum(facts.scored.quarantined(role)[Reason.DUPLICATE_ID] for role in ("audit", "unseen", "seen"))
    outcome = Outcome.INCONCLUSIVE if count else Outcome.PASSED
    return CountDiagnostic(outcome=outcome, sentence=repeated_ids_sentence(count), count=count)


def repeats_in_sample(sample: DocumentSample) -> CountDiagnostic:
    """The number of documents that were read and repeat an id."""
    read, budget = list(sample.read.values()), sample.config.error_budget
    count = sum(keys.repeats.size for keys in read)
    if not count:
        return CountDiagnostic(outcome=Outcome.PASSED, sentence=NO_REPEATED_ID, count=0)
    places = [(keys, int(position)) for keys in read for position in keys.repeats[:EXAMPLES]][:EXAMPLES]
    over = count > budget * sum(len(keys.keys) for keys in read)
    ids = [keys.doc_id(place) for keys, place in places]
    of_file = places[0][0].whole_file(places[0][1])
    sentence = repeated_ids_to_come(count, ids, budget if over else None, sample.whole)
    sentence += repeats_differ(of_file.name, distinguishing_column(of_file))
    return CountDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence=sentence, count=count)


def _lines(result: CountDiagnostic, planned: Planned) -> list[SampleLine]:
    return [SampleLine(result.outcome, result.sentence)]


# --- sentences

NO_REPEATED_ID = "No document repeats an id."


def repeated_ids_to_come(count: int, first: Sequence[str], budget: float | None, whole: bool) -> str:
    """States how many documents will be quarantined because they repeat an id.

    Args:
        count: number of documents, at least 1.
        first: ids of the first ones.
        budget: `error_budget`, if it allows fewer; else None.
        whole: whether all documents were read.
    """
    verb = "document repeats an id and goes" if count == 1 else "documents repeat an id and go"
    sentence = f"{count} {verb} to quarantine (first: {', '.join(map(short_id, first))})."
    if budget is None:
        return sentence
    alike = "" if whole else "if the others are like these, "
    return f"{sentence} error_budget {budget:g} allows fewer: {alike}the run would end without an answer."


def repeats_differ(name: str, differing: tuple[str, Sequence[str]] | None) -> str:
    """States which column differs where an id repeats, and how to take the rows of one of its values; None: nothing."""
    if differing is None:
        return ""
    column, values = differing
    field = f".{column}" if column.isidentifier() else f".[{json.dumps(column)}]"
    wanted = shlex.quote(f"select({field} == {json.dumps(values[0], ensure_ascii=False)})")
    return (
        f" In {name} documents of one id differ in column {column!r} ({', '.join(values)}): give a file of the rows of "
        f"one value, for JSONL by jq -c {wanted} {shlex.quote(name)} > one.jsonl"
    )


def repeated_ids_sentence(count: int) -> str:
    """States how many scored documents repeat an id."""
    verb = "repeats" if count == 1 else "repeat"
    return f"{documents(count)} {verb} an id and {was(count)} quarantined." if count else NO_REPEATED_ID


CHECK = Check(
    name="duplicates",
    title="Repeated ids",
    record=CountDiagnostic,
    description="Documents that repeat an id, which are quarantined.",
    absent="never",
    place=6,
    on_scores=duplicates_diagnostic,
    sample=SampleCheck(
        "duplicates", CountDiagnostic, "Documents that repeat an id of their role.", repeats_in_sample, _lines
    ),
    finding=repeated_ids,
)
