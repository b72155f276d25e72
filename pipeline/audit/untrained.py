"""Whether an adapter that a selection reads was trained on documents that the selection judges."""

from __future__ import annotations

from pipeline.audit.allocation import trained_text, training_index
from pipeline.audit.records import KEYS_FILE
from pipeline.audit.scored import Each, Scored
from pipeline.config.audit import AuditConfig
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.near_copies import sketches_of
from pipeline.detectors.registry import adapters_of, parse_detectors
from pipeline.errors import UserError
from pipeline.selection.procedures import procedure_of
from pipeline.store.receipts import Receipt


def check_training(config: AuditConfig, scored: Scored, each: Each) -> None:
    """Check that no adapter which a selection reads was trained on documents that it judges.

    An equal text stops every selection. Another near copy stops those where a low deviation is evidence: direction
    clean, and adadetect, which may learn so. Where members are sought, training on a like text lowers a document's
    deviation and makes it look less like a member, so it costs power and not the promise; the diagnostic `fine_tuned`
    counts such documents.

    Raises:
        UserError: one was; then the audited documents differ from those that calibrate, which none was trained on.
    """
    reading = [selection for selection in config.selections if _reads_adapter(config, selection)]
    if not reading:
        return
    training_keys = scored.store.read_table(KEYS_FILE)

    index = training_index(training_keys, config.near_copies)

    def trained(receipt: Receipt) -> tuple[int, int]:
        keys = scored.table(receipt, ["text_key", "sketch"])
        equal = trained_text(keys["text_key"].to_numpy(), training_keys)
        return int(equal.sum()), int((index.matches(sketches_of(keys["sketch"])) & ~equal).sum())

    parts = list(each(scored.of("audit"), trained))
    if count := sum(copies for copies, _ in parts):
        raise UserError(
            f"the adapters were trained on {count} audit documents and cannot judge these; take them out of what is "
            "fine-tuned on, or begin a run anew with overlap: drop"
        )
    count = sum(alike for _, alike in parts)
    strict = [selection.name for selection in reading if not _lenient(selection)]
    if count and strict:
        raise UserError(
            f"the adapters were trained on near copies of {count} audit documents, which selection {strict[0]} could "
            "take for clean; take them out of what is fine-tuned on, or begin a run anew with overlap: drop"
        )


def _reads_adapter(config: AuditConfig, selection: SelectionConfig) -> bool:
    return bool(adapters_of([d for d in parse_detectors(config.detectors) if d.column in selection.detectors]))


def _lenient(selection: SelectionConfig) -> bool:
    """Whether a lower score can only keep a document from being selected."""
    return selection.direction == "members" and not procedure_of(selection.procedure).learns
