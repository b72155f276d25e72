"""The weights of a run's documents: learnt once, from a sample, and then one file a score shard."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.audit.blind import sample_documents
from pipeline.audit.density_weights import LearntWeights, Weigher, learn_weights
from pipeline.audit.records import Record, read_part, write_part
from pipeline.audit.scored import Each, Scored
from pipeline.audit.summary import BlindDiagnostic
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.corpus.documents import read_shard, text_key
from pipeline.errors import DamagedError, UserError
from pipeline.report.wording.files import changed as not_written
from pipeline.report.wording.files import made_again_note
from pipeline.store.receipts import Receipt, read_filed

_log = logging.getLogger(__name__)

AT_ONCE = 1_000
"""Texts that are weighed together; memory holds no more of them."""

WEIGHTS_SCHEMA = pa.schema([("row", pa.int64()), ("weight", pa.int64())])

_FORM = 3  # by halvings, with digests of the files


class Weighting(Record):
    """That the documents of a run are weighed, and what the weights repair: `diagnostics/weights-<role>.json`."""

    seed: int = Field(description="Seed of the run when they were weighed.")
    blind: BlindDiagnostic = Field(description="The blind test with the weights.")
    form: int = Field(1, description="Form of the test; weights with a test of another form are made again.")
    files: dict[str, str] = Field({}, description="SHA-256 of each file of weights, by its name in the run directory.")


@dataclass(frozen=True, slots=True)
class RunWeights:
    """The weights of the audited documents and of those of a known role, in files of the run."""

    scored: Scored
    role: Role
    blind: BlindDiagnostic  # the blind test with the weights

    def of(self, table: pa.Table, receipt: Receipt) -> np.ndarray:
        """Weights of documents of a score shard, int64, in their order; the table has their column `row`."""
        weighed = self.scored.store.read_table(_file(self.role, receipt))
        rows, weights = weighed["row"].to_numpy(), weighed["weight"].to_numpy()
        order = np.argsort(rows, kind="stable")
        places = order[np.searchsorted(rows, table["row"].to_numpy(), sorter=order)]
        return np.asarray(weights[places])

    def of_role(self) -> np.ndarray:
        """Weights of all documents of the known role, int64, in the order of `Scored.batches`."""
        parts = [self.of(self.scored.table(receipt, ["row"]), receipt) for receipt in self.scored.of(self.role)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def weigh_run(scored: Scored, role: Role, config: AuditConfig, each: Each) -> RunWeights:
    """Weigh the audited documents of a run and those of a known role, once; a later selection reads the files.

    The classifier is taught here, with the texts of the blind test; every shard is then weighed by it alone. So the
    weights do not depend on the number of workers, and memory holds few texts at a time.

    Args:
        scored: the score shards.
        role: whose documents calibrate.
        config: of the run.
        each: a function of every shard.

    Raises:
        UserError: fewer than 20 documents of either role, or texts that are gone or changed since they were scored.
    """
    name, seed = weights_record_file(role), config.seed
    try:
        weighting = read_part(scored.store, name, Weighting)
    except DamagedError as error:
        _log.warning(made_again_note(error, "the weights are"))
        weighting = None
    if weighting is not None and (weighting.seed, weighting.form) == (seed, _FORM):
        changed = _changed_file(scored, role, weighting, each)
        if changed is None:
            return RunWeights(scored, role, weighting.blind)
        _log.warning(made_again_note(not_written(f"{scored.store.url}/{changed}"), "the weights are"))
    scored.store.remove(name)
    learnt = _learn(scored, role, config)
    blind = learnt.tested(role)

    def weigh(receipt: Receipt) -> tuple[str, str]:
        file = _file(role, receipt)
        return file, scored.store.write_table(file, _weights_of(scored, receipt, learnt.weigher))

    files = dict(sorted(each(_weighed(scored, role), weigh)))
    write_part(scored.store, name, Weighting(seed=seed, blind=blind, form=_FORM, files=files))
    return RunWeights(scored, role, blind)


def _weighed(scored: Scored, role: Role) -> list[Receipt]:
    """The score shards whose documents have weights."""
    return [*scored.of("audit"), *scored.of(role)]


def _changed_file(scored: Scored, role: Role, weighting: Weighting, each: Each) -> str | None:
    """A file of weights that is gone or was changed since it was written; None where there is none."""

    def compare(receipt: Receipt) -> str | None:
        file = _file(role, receipt)
        return None if scored.store.digest(file) == weighting.files.get(file, "") else file

    return min(filter(None, each(_weighed(scored, role), compare)), default=None)


def weights_record_file(role: Role) -> str:
    """Where a run directory says that the documents of a role are weighed."""
    return f"diagnostics/weights-{role}.json"


def _file(role: Role, receipt: Receipt) -> str:
    return f"weights/{role}/{receipt.shard}.parquet"


def _learn(scored: Scored, role: Role, config: AuditConfig) -> LearntWeights:
    """The weigher, from a sample of the texts."""
    shards = scored.shards.values()
    kinds: tuple[Role, Role] = (role, "audit")
    samples = (sample_documents([shard for shard in shards if shard.role == kind]) for kind in kinds)
    known, audit = ([document for _, document in sample] for sample in samples)
    return learn_weights(known, audit, config)


def _weights_of(scored: Scored, receipt: Receipt, weigher: Weigher) -> pa.Table:
    """The weights of a shard's scored documents, by row."""
    table = read_filed(scored.store, receipt, ["row", "id_key", "text_key"])
    columns = (table[name].to_pylist() for name in table.column_names)
    wanted = {row: (key, of_text) for row, key, of_text in zip(*columns, strict=True)}
    rows: list[int] = []
    weights = [np.empty(0, dtype=np.int64)]
    shard = scored.shards[receipt.shard]
    readable = (document for document in read_shard(shard, wanted=wanted) if document.problem is None)
    while some := list(islice(readable, AT_ONCE)):
        if any(text_key(document.text) != wanted[document.row][1] for document in some):
            break
        rows += [document.row for document in some]
        keys = np.array([wanted[document.row][0] for document in some], dtype=np.int64)
        weights.append(weigher.weigh([document.text for document in some], keys))
    if len(rows) < len(wanted):
        raise UserError(
            f"calibration weighted reads the texts again, and those of {shard.name} are not the ones that were scored"
        )
    return pa.table({"row": rows, "weight": np.concatenate(weights)}, schema=WEIGHTS_SCHEMA)
