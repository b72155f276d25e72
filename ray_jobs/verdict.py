"""The driver of a verdict on a collection: reads the scores of a finished run, touches no model."""

from __future__ import annotations

from pipeline.audit.description import build_config
from pipeline.audit.history import answer_names
from pipeline.audit.judge import judge_collection
from pipeline.audit.manifest import read_run
from pipeline.audit.scored import check_budget, read_scored
from pipeline.audit.status import made_answer
from pipeline.audit.verdict import BlockKind, CollectionVerdict, write_verdict
from pipeline.endpoint.keys import keys_withdrawn
from pipeline.report import rewrite_report
from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from ray_jobs.maps import fold_of


def give_verdict(run: str, blocks: BlockKind | None = None) -> CollectionVerdict:
    """Was the collection of a finished run trained on? Written to verdict.json, and into the report if there is one.

    Args:
        run: the run directory, a local path or an fsspec URL.
        blocks: what moves whole; by default groups where documents have one, else families of near copies.

    Raises:
        UserError: not a run directory, an unfinished run (exit 3), a damaged answer, no unseen documents, or too few of
            them.
    """
    store = Store(run)
    manifest, shards = read_run(store)
    config = build_config(manifest.config.model_dump(mode="json", by_alias=True))
    with keys_withdrawn(config.models), RunLock(store) as lock:
        for name in answer_names(store, manifest.config):  # before anything is computed or written
            made_answer(store, name, held=True)
        scored = read_scored(lock.held, shards)
        check_budget(config, scored)
        verdict = judge_collection(config, scored, manifest.limit, fold_of(lock.held, True), blocks)
        verdict = write_verdict(lock.held, verdict)
        rewrite_report(lock.held)
    return verdict
