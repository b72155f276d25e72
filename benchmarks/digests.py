"""What digests take of a selection: of the score files that it reads and of the answer that it writes."""

from __future__ import annotations

import hashlib
import tempfile
import time

import numpy as np
import pyarrow as pa

from pipeline.answers.select import Answering, run_digests, select_all
from pipeline.checks.blind import BlindTest, blind_file
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.corpus.near_duplicates import SKETCH, SKETCH_TYPE
from pipeline.corpus.shard import Shard
from pipeline.plan.description import build_config
from pipeline.run.digests import check_answer, read_digests
from pipeline.run.records import write_part
from pipeline.run.scored import each_in_turn, read_scored
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, write_filed, write_receipt

KNOWN = 10_000
SHARD = 250_000
MEMBERS, SHIFT = 0.3, 2.5


def digest_shares(documents: int) -> dict[str, float]:
    """What digests take of the selection of so many documents, from score files to a written answer.

    Returns:
        Processor time of the selection in seconds; what digests take of it, and what checking its answer takes as a
        part of it; megabytes that have digests.
    """
    sentence = "The texts of this run are made up."
    made_up = BlindTest(outcome=Outcome.INCONCLUSIVE, tested=False, sentence=sentence)
    with tempfile.TemporaryDirectory() as folder:
        config, store = _audit(folder), Store(f"{folder}/run")
        shards = [_score_file(store, "unseen", 0, KNOWN)]
        shards += [
            _score_file(store, "audit", start, min(SHARD, documents - start)) for start in range(0, documents, SHARD)
        ]
        write_part(store, blind_file("unseen"), made_up)
        start = time.process_time()
        scored = read_scored(store, shards)
        select_all(config, scored, None, each_in_turn, Answering(texts=False))
        seconds = time.process_time() - start
        written = read_digests(store, "members")
        assert written is not None
        answer = [store.read(name) for name in written.files if name.startswith("selection/members/")]
        scores = [store.read(receipt.data) for receipt in scored.receipts]
        start = time.process_time()
        for data in (*scores, *answer):
            hashlib.sha256(data).hexdigest()
        run_digests(Store(store.url))
        digest_seconds = time.process_time() - start
        start = time.process_time()
        check_answer(Store(store.url), "members", whole=True)
        check_seconds = time.process_time() - start
    return {
        "select_seconds": round(seconds, 2),
        "digest_share": round(digest_seconds / seconds, 4),
        "digest_check_share": round(check_seconds / seconds, 4),
        "digested_mb": round(sum(map(len, (*scores, *answer))) / 1e6, 1),
    }


def _audit(folder: str) -> AuditConfig:
    selection = {"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.1}
    return build_config(
        {
            "run": f"{folder}/run",
            "model": {"path": "org/model"},
            "corpus": {role: {"path": f"{folder}/{role}.jsonl"} for role in ("audit", "unseen")},
            "detectors": ["loss"],
            "selections": [selection],
            "overlap": "drop",
        }
    )


def _score_file(store: Store, role: Role, first: int, count: int) -> Shard:
    """File made-up scores of documents, of which a part are members; their shard."""
    rng = np.random.default_rng([role == "audit", first])
    scores = rng.normal(size=count)
    scores[: int(MEMBERS * count) * (role == "audit")] += SHIFT
    rows = np.arange(first, first + count)
    keys = rng.integers(1 << 62, size=(2, count))
    columns = {
        "doc_id": pa.array([f"{role}.jsonl#{row}" for row in rows.tolist()]),
        "role": pa.array([role] * count),
        "group": pa.nulls(count, pa.string()),
        "row": rows,
        "n_tokens": np.full(count, 100, dtype=np.int32),
        "truncated": np.zeros(count, dtype=bool),
        "id_key": keys[0],
        "text_key": keys[1],
        "sketch": pa.FixedSizeBinaryArray.from_buffers(
            SKETCH_TYPE, count, [None, pa.py_buffer(rng.bytes(SKETCH * count))]
        ),
        "loss": scores,
    }
    shard = Shard(
        f"{role}-{first:09d}",
        role,
        f"{role}.jsonl",
        f"{role}.jsonl",
        "jsonl",
        first,
        first + count,
        first,
        None,
        "",
        "text",
        None,
        None,
    )
    data = f"scores/{shard.id}.parquet"
    files = {data: write_filed(store, data, pa.table(columns))}
    receipt = Receipt(shard.id, role, count, count, 0, data, None, {}, {}, files, "")
    write_receipt(store, "score", receipt)
    return shard
