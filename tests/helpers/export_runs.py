"""Builds finished runs for exports: real inputs, receipts and selections over made-up scores, and no model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.answers.select import select_all
from pipeline.checks.blind import BlindTest, blind_file
from pipeline.corpus.documents import ContentDigest, Document, id_key, read_shard, text_key
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.near_duplicates import sketch
from pipeline.corpus.shard import Shard
from pipeline.export.export import Exported, write_export
from pipeline.export.request import ExportRequest
from pipeline.plan.description import build_config
from pipeline.run.manifest import AuditedModel, InputRecord, Manifest, write_manifest, write_shards
from pipeline.run.plan import make_plan
from pipeline.run.records import write_part
from pipeline.run.scored import read_scored
from pipeline.selection.guarantees import Outcome
from pipeline.stages.events import QUARANTINE_SCHEMA
from pipeline.stages.score import score_schema
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, write_filed, write_receipt
from tests.helpers.commands import user_error
from tests.helpers.made_up import sentence

KNOWN = 15
"""Documents that calibrate."""

NOT_TESTED = "Whether the words differ was not tested: the texts of this run are made up."


def is_third(document: Document) -> bool:
    """Whether a document is one of those that the made-up scores single out."""
    return document.row % 3 == 0


def finished_run(
    folder: Path,
    source: dict[str, Any],
    chosen: Callable[[Document], bool] = is_third,
    direction: str = "members",
    limit: int | None = None,
    **settings: Any,
) -> str:
    """A run that selected the chosen documents of a source, and no others, if they are at least two; its address.

    The direction is that of its one selection, unless the settings have others.
    """
    folder.mkdir(exist_ok=True, parents=True)
    known = folder / "known.jsonl"
    known.write_text("".join(json.dumps({"text": sentence(10_000 + i)}) + "\n" for i in range(KNOWN)))
    selection = {"name": "chosen", "direction": direction, "detectors": ["loss"], "procedure": "bh", "alpha": 0.25}
    roles = {"unseen": {"path": str(known)}, "seen": {"path": str(known)}}
    described = {
        "run": str(folder / "run"),
        "model": {"path": "org/model"},
        "corpus": {"audit": source, **roles},
        "detectors": ["loss"],
        "selections": [selection],
        "resources": {"shard_bytes": 2000},
        "overlap": "drop",
        "error_budget": 0.9,
    }
    config = build_config({**described, **settings})
    plan, store = make_plan(config, limit), Store(config.run)
    shards = number_rows(plan.shards)
    write_shards(store, shards)
    sign = 1 if direction == "members" else -1
    for shard in shards:
        far = 50.0 * sign if shard.role == "audit" else 0.0
        file_scores(store, shard, lambda document, far=far: far if chosen(document) else -far)
    manifest = Manifest(
        config=config,
        limit=limit,
        seed=7,
        versions={"seenset": "0.6.0", "torch": "2.9"},
        fingerprint={"weights": "ab12"},
        inputs=[InputRecord.model_validate(entry, from_attributes=True) for entry in plan.inputs],
        passes=[],
        model=AuditedModel(architecture="LlamaForCausalLM", dtype="float32", max_tokens=2048, parameters=None),
    )
    write_manifest(store, manifest)
    for role in ("unseen", "seen"):
        write_part(store, blind_file(role), BlindTest(outcome=Outcome.INCONCLUSIVE, tested=False, sentence=NOT_TESTED))
    select_all(config, read_scored(store, shards), limit, lambda receipts, f: map(f, receipts))
    return config.run


def export(run: str, out: object = None, **request: Any) -> Exported:
    """Export a run into a folder or to a URL."""
    return write_export(ExportRequest(run, None if out is None else str(out), **request))


def refusal(run: str, out: object = None, **request: Any) -> str:
    """The one line of an export that is refused."""
    return user_error(export, run, out, **request)


def whole_shard(path: Path, form: str) -> Shard:
    """A shard of all of a file."""
    values = {"start": 0, "stop": None, "first_row": 0, "max_rows": None, "content": "", "text": "text"}
    columns = {"id_column": None, "group_column": None}
    return Shard(id="a", role="audit", name=path.name, path=str(path), format=form, **columns, **values)


def file_scores(store: Store, shard: Shard, raised: Callable[[Document], float], column: str = "loss") -> None:
    """File made-up scores of a shard, as scoring would: documents that cannot be read go to quarantine."""
    content, rows, refused, ids = ContentDigest(), [], [], set[str]()
    for document in read_shard(shard, content):
        problem = document.problem or (("duplicate_id", "twice") if document.doc_id in ids else None)
        ids.add(document.doc_id)
        common = {"doc_id": document.doc_id, "role": shard.role, "row": document.row, "id_key": id_key(document.doc_id)}
        if problem is not None:
            refused.append(
                {**common, "source": shard.name, "stage": "score", "reason": problem[0], "message": problem[1]}
            )
            continue
        noise = np.random.default_rng([shard.role == "audit", document.row]).normal()
        rows.append(
            {
                **common,
                "group": document.group,
                "n_tokens": 10,
                "truncated": False,
                "text_key": text_key(document.text),
                "sketch": sketch(document.text),
                column: noise + raised(document),
            }
        )
    data, quarantine = f"scores/{shard.id}-a.parquet", f"quarantine/{shard.id}-a.parquet"
    files = {data: write_filed(store, data, pa.Table.from_pylist(rows, schema=score_schema([column])))}
    if refused:
        files[quarantine] = write_filed(store, quarantine, pa.Table.from_pylist(refused, schema=QUARANTINE_SCHEMA))
    reasons = [entry["reason"] for entry in refused]
    receipt = Receipt(
        shard=shard.id,
        role=shard.role,
        n_in=len(rows) + len(refused),
        n_scored=len(rows),
        n_quarantined=len(refused),
        data=data,
        quarantine=quarantine if refused else None,
        reasons={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        fingerprint={},
        files=files,
        documents=content.hexdigest(),
    )
    write_receipt(store, "score", receipt)
