"""Known documents with texts of audited ones, found by keys: before scoring in a sample, and after it in all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipeline.checks.check import KNOWN_TEXTS, AnswerFacts, Check, Overlap, Planned, SampleCheck, SampleLine
from pipeline.checks.diagnostic import NearDuplicatePair, OverlapDiagnostic
from pipeline.checks.document_sample import DocumentSample, calibrating
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.kinds import Capability
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.keys import Keys
from pipeline.corpus.known_texts import NAMED_PAIRS, KnownTexts, SharedTexts
from pipeline.detectors.registry import needed_adapters, needed_prefixes, parse_detectors
from pipeline.errors import UserError
from pipeline.run.scored import RoleRows, Scored, ShardMap, each_in_turn, in_order, trained_texts
from pipeline.selection.guarantees import Outcome
from pipeline.selection.procedures.record import procedure_of
from pipeline.store.receipts import Receipt
from pipeline.wording import short_id

Ids = Callable[[Sequence[int]], Sequence[str]]
"""Returns the ids of documents of a role by their places."""


def find_shared(
    parts: Sequence[SharedTexts], n_known: int, audit: Ids, known: Ids, role: str, consequence: str = ""
) -> tuple[OverlapDiagnostic, np.ndarray]:
    """Find the texts that the audited documents share with a known role.

    Args:
        parts: shared texts of the audited documents, in their order.
        n_known: total number of known documents.
        audit: ids of audited documents.
        known: ids of known documents.
        role: role of the known documents.
        consequence: the treatment of documents in two roles, a clause that follows "and".

    Returns:
        The check, and whether each known document is shared: bool, (n_known,).
    """
    near, equal = (np.zeros(n_known, dtype=bool) for _ in range(2))
    for part in parts:
        near[part.near] = True
        equal[part.equal] = True
    begins = np.cumsum([0, *(part.n_documents for part in parts)]).tolist()
    first = [(begin + at, *pair) for begin, part in zip(begins, parts, strict=False) for at, *pair in part.pairs]
    pairs = [
        NearDuplicatePair(audit=audit([at])[0], calibration=known([place])[0], share=round(share, 2))
        for at, place, share in first[:NAMED_PAIRS]
    ]
    diagnostic = OverlapDiagnostic(
        outcome=Outcome.PASSED,
        sentence="",
        n_calibration=int(np.count_nonzero(near)),
        n_equal=int(np.count_nonzero(equal)),
        n_audit=sum(part.n_near for part in parts),
        pairs=pairs,
    )
    sentence = shared_sentence(diagnostic, role, consequence)
    return diagnostic.model_copy(update={"sentence": sentence}), near


def shared_error(overlap: OverlapDiagnostic, n_known: int, role: str) -> UserError:
    """The error for calibration documents that are near-duplicates of audited ones.

    Args:
        overlap: an overlap with at least one pair.
        n_known: total number of calibration documents.
        role: role of the calibration documents.
    """
    return UserError(
        f"{overlap.n_calibration} of {n_known} {role} documents are near-duplicates of audit documents "
        f"({overlap.n_equal} of them with the same text; {overlap.n_audit} audit documents; "
        f"first: {named_pairs(overlap.pairs)}); remove them, or set overlap: drop to leave them out of calibration"
    )


def check_calibration_left(overlap: OverlapDiagnostic, n_known: int, role: str) -> None:
    """Check that `overlap: drop` leaves a calibration document; arguments as in `shared_error`.

    Raises:
        UserError: every document of the role is a near-duplicate of an audited one.
    """
    if 0 < n_known == overlap.n_calibration:
        raise UserError(
            f"no calibration documents: all {n_known} {role} documents are near-duplicates of audit documents "
            f"(first: {named_pairs(overlap.pairs)}), and overlap: drop leaves them out; give others to calibrate on"
        )


def overlaps_in_sample(sample: DocumentSample) -> dict[Role, OverlapDiagnostic]:
    """The overlap of each known role with the audited documents that were read.

    Raises:
        UserError: the errors of `check_calibration_left`, if all documents of a role were read.
    """
    overlaps, config = {}, sample.config
    for role in sample.compared:
        known, audit = sample.read[role], sample.read["audit"]
        texts = known.keys.take(known.compared)
        shared = KnownTexts.of(texts.text, texts.sketch, config.near_copies).shared(audit.keys.take(audit.compared))
        overlaps[role] = find_shared([shared], len(texts), audit.compared_ids, known.compared_ids, role)[0]
    for role in calibrating(config):
        if role in overlaps and config.overlap == "drop" and sample.read[role].whole:
            check_calibration_left(overlaps[role], sample.read[role].once.size, role)
    return overlaps


def _lines(results: Mapping[Role, OverlapDiagnostic], planned: Planned) -> list[SampleLine]:
    roles = [role for role in calibrating(planned.config) if role in results]
    return [SampleLine(results[role].outcome, results[role].sentence, role) for role in roles]


def _refuse(results: Mapping[Role, OverlapDiagnostic], read: Planned) -> UserError | None:
    if read.config.overlap != "error":
        return None
    shared = [(role, results[role]) for role in calibrating(read.config) if role in results]
    return next((shared_error(one, read.documents[role], role) for role, one in shared if one.n_calibration), None)


def find_overlaps(
    scored: Scored, roles: Sequence[Role], config: AuditConfig, each: ShardMap = each_in_turn
) -> dict[Role, Overlap]:
    """Find calibration documents of some roles that are near-duplicates of audited ones, and audited ones in training.

    Audited documents are read once for all roles. Answers and bundles call this by name and not through the registry:
    it decides which documents calibrate, before there is an answer of which a check could be made.

    Args:
        scored: the score shards.
        roles: the roles whose documents calibrate.
        config: the audit's configuration.
        each: reads the shards.

    Raises:
        UserError: there are some, and the configuration does not set `overlap: drop`; also errors of `_check_trained`.
    """
    detectors = parse_detectors(config.detectors)
    needing = [one.column for one in detectors if needed_adapters([one]) or needed_prefixes([one])]
    concerned = [selection for selection in config.selections if {*needing} & {*selection.detectors}]
    trained = trained_texts(scored.store, config.near_copies, needed=bool(concerned))
    known = {}
    for role in roles:
        keys = Keys.joined(scored.keys(receipt, finetuned=True) for receipt in scored.of(role))
        known[role] = KnownTexts.of(keys.text, keys.sketch, config.near_copies)

    def of_shard(receipt: Receipt) -> tuple[list[SharedTexts], int, int]:
        some = scored.keys(receipt)
        equal = trained.equal(some)
        return [known[role].shared(some) for role in roles], int(equal.sum()), int((trained.near(some) & ~equal).sum())

    parts = in_order(each, scored.of("audit"), of_shard)
    n_trained = sum(alike for _, _, alike in parts)
    _check_trained(config, concerned, sum(equal for _, equal, _ in parts), n_trained)
    overlaps = {}
    for place, role in enumerate(roles):
        of_role = [shared[place] for shared, _, _ in parts]
        ids = RoleRows(scored, "audit").ids, RoleRows(scored, role, finetuned=True).ids
        diagnostic, near = find_shared(of_role, known[role].text.size, *ids, role, LEFT_OUT)
        if diagnostic.n_calibration and config.overlap == "error":
            raise shared_error(diagnostic, near.size, role)
        calibrates = ~trained.index.matches(known[role].index.sketches) if scored.n_finetuned(role) else slice(None)
        overlaps[role] = Overlap(diagnostic, n_trained, ~near[calibrates])
    return overlaps


def _check_trained(config: AuditConfig, concerned: Sequence[SelectionConfig], n_equal: int, n_alike: int) -> None:
    """Check that no adapter or prefix of a selection contains documents that it judges.

    An equal text stops every selection. Another near-duplicate stops those in which a low deviation is evidence: those
    of direction clean, and adadetect, which may learn it. In direction members, training on a similar text lowers a
    document's deviation, which makes it look less like a member: it costs power but not the guarantee, and `fine_tuned`
    counts these. The same holds for unseen prefix documents; near-duplicates of seen ones look like members.

    Args:
        config: the audit's configuration.
        concerned: the selections that read an adapter or a prefix.
        n_equal: audited documents whose text an adapter was trained on or a prefix contains.
        n_alike: other audited documents that are near-duplicates of such a text.

    Raises:
        UserError: there are some, so that the audited documents differ from the calibration documents.
    """
    if n_equal and concerned:
        raise UserError(
            f"the adapters were trained on {n_equal} audit documents and cannot judge these (or a prefix or count "
            "holds them); take them out of what is fine-tuned on or shown, or start a new run with overlap: drop"
        )
    strict = [selection.name for selection in concerned if not _lenient(config, selection)]
    if n_alike and strict:
        raise UserError(
            f"the adapters were trained on near-duplicates of {n_alike} audit documents, which selection {strict[0]} "
            "could take for clean (or a prefix or count holds them); take them out of what is fine-tuned on or shown, "
            "or start a new run with overlap: drop"
        )


def _lenient(config: AuditConfig, selection: SelectionConfig) -> bool:
    """Whether similarity to a training or prefix document can only keep a document from being selected."""
    read = [d for d in parse_detectors(config.detectors) if d.column in selection.detectors]
    if any(prefix.role == "seen" for prefix in needed_prefixes(read)):
        return False
    return selection.direction == "members" and not procedure_of(selection.procedure).learns


# --- sentences

LEFT_OUT = "left out of calibration"
"""Treatment of calibration documents that are near-duplicates of audited ones."""


def shared_sentence(overlap: OverlapDiagnostic, role: str, consequence: str) -> str:
    """States the overlap of known documents with the audited ones.

    Args:
        overlap: the counts and the first pairs.
        role: role of the known documents.
        consequence: treatment of documents in two roles, a clause that follows "and"; may be empty.
    """
    count = overlap.n_calibration
    if not count:
        return (
            f"No {role} document was found to be a near-duplicate of an audited one; single passages in common are not "
            "looked for."
        )
    verb = f"{role} document is a near-duplicate" if count == 1 else f"{role} documents are near-duplicates"
    rest = f", and {consequence}" if consequence else ""
    return (
        f"{count} {verb} of audited documents, {overlap.n_equal} with the same text{rest} "
        f"(first: {named_pairs(overlap.pairs)})."
    )


def named_pairs(pairs: Sequence[NearDuplicatePair]) -> str:
    """Pairs of near-duplicates as listed in a sentence, each with its share of common runs of words."""
    return "; ".join(f"{short_id(pair.audit)} and {short_id(pair.calibration)}, {pair.share:.0%}" for pair in pairs)


# --- the check

NO_OVERLAP = Overlap(
    OverlapDiagnostic(outcome=Outcome.PASSED, sentence="No other document calibrates.", n_calibration=0, n_audit=0),
    n_trained=0,
    keep=np.ones(0, dtype=bool),
)
"""The overlap of documents with versions."""


def _unmade(facts: AnswerFacts) -> OverlapDiagnostic:
    if Capability.VERSIONS in facts.offers:
        return NO_OVERLAP.diagnostic
    untested = f"Whether {facts.role} documents are near-duplicates of audited ones was not tested."
    return OverlapDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence=untested, n_calibration=0, n_audit=0)


CHECK = Check(
    name="overlap",
    title="Overlap between roles",
    record=OverlapDiagnostic,
    description="Calibration documents that are near-duplicates of audited ones.",
    absent="never",
    place=3,
    needs=KNOWN_TEXTS,
    on_scores=lambda facts: None if facts.overlap is None else facts.overlap.diagnostic,
    unmade=_unmade,
    sample=SampleCheck(
        "overlap",
        dict[Role, OverlapDiagnostic],
        "Overlap of each known role with the audited documents.",
        overlaps_in_sample,
        _lines,
        refuse=_refuse,
    ),
    finding=find_shared,
)
