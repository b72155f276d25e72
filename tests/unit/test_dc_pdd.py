"""dc_pdd is its paper's formula, with counts of documents that never calibrate; who cannot have it is refused."""

from collections import Counter
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks.small_model import WORDS
from pipeline.config.audit import AuditConfig
from pipeline.corpus.documents import Document
from pipeline.corpus.keys import Keys
from pipeline.detectors.base import Prefix
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.models.opened import embedding_rows
from pipeline.plan.allocation import allocation_record, hashes
from pipeline.plan.description import build_config
from pipeline.plan.stage_plan import build_stages
from pipeline.run.plan import make_plan
from pipeline.stages.local import finish_shards
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from tests.helpers.made_up import write_corpus

TEXTS = {
    f"{role}-{at}": " ".join(WORDS[i] for i in np.random.default_rng([place, at]).integers(len(WORDS), size=8 + at))
    for place, role in enumerate(("audit", "unseen"))
    for at in range(24)
}


def config_of(folder: Path, model: dict[str, Any], *detectors: Any, **settings: Any) -> AuditConfig:
    texts = {role: [text for key, text in TEXTS.items() if key.startswith(role)] for role in ("audit", "unseen")}
    described = {"run": str(folder / "run"), "model": model, "detectors": list(detectors)}
    return build_config({**described, "corpus": write_corpus(folder, texts), **settings})


@pytest.mark.parametrize("batch_tokens", [1, 200, 2000])
def test_scores_are_the_formula_with_counts_of_documents_that_do_not_calibrate(
    batch_tokens: int, tmp_path: Path, tiny_model_folder: Path
) -> None:
    model = {"path": str(tiny_model_folder), "dtype": "float32"}
    columns = {"dc_pdd(clip=0.01, documents=9)": 0.01, "dc_pdd(clip=0.012, documents=9)": 0.012}
    detector = {"dc_pdd": {"clip": list(columns.values()), "documents": 9}}
    config = config_of(tmp_path, model, detector, max_tokens=20, resources={"batch_tokens": batch_tokens})
    shards, store, lm = make_plan(config).shards, Store(config.run), open_model(config.model)
    work = build_stages(config, shards)
    record = allocation_record(work.parts, {})
    (counted,) = record.shots.values()
    known = {key: hashes(Keys.of([Document(0, key, text, None)]).text)[0] for key, text in TEXTS.items()}
    assert len(counted) == 9
    assert {*counted, *record.calibration["unseen"]} == {known[key] for key in TEXTS if key.startswith("unseen")}
    assert not {*counted} & {*record.calibration["unseen"]}
    counts = Counter[int]()
    for key, text in TEXTS.items():
        if known[key] in counted:
            counts.update(lm.tokenizer(text, add_special_tokens=False).input_ids[:20])
    total = counts.total() + embedding_rows(lm.model)
    done = [event for event in finish_shards(work.stages[-1], shards, store, 1) if isinstance(event, Receipt)]
    rows = pa.concat_tables([store.read_table(receipt.data) for receipt in done]).to_pylist()
    assert len(rows) == len(TEXTS)
    lowest: dict[float, set[bool]] = {clip: set() for clip in columns.values()}
    for row in rows:
        ids = lm.tokenizer(TEXTS[row["doc_id"]]).input_ids[:20]
        with torch.inference_mode():
            log_p = lm.model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(1)
        first = {token: at for at, token in reversed(list(enumerate(ids[1:])))}
        for column, clip in columns.items():
            values = [
                min(clip, exp(log_p[at, token]) * log(total / (counts[token] + 1))) for token, at in first.items()
            ]
            lowest[clip] |= {value < clip for value in values}
            assert row[column] == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert all(len(both) == 2 for both in lowest.values())  # some tokens are clipped, others are not
    few = work.parts.prefixes()
    prefix, shots = next(iter(few.shots.items()))
    other = replace(few, shots={prefix: replace(shots, ids=shots.ids[1:])})
    assert other.fingerprint() != few.fingerprint()
    assert str(prefix) in work.stages[-1].fingerprint["prefixes"]
    assert prefix == Prefix("unseen", 9, counted=True)


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("dc_pdd", "tokens of 100 of unseen: corpus.unseen has 24 documents, .* set documents to at most 23"),
        ({"dc_pdd": {"clip": 0}}, "clip .* got 0"),
        ({"dc_pdd": {"documents": 0}}, "documents .* got 0"),
    ],
)
def test_what_cannot_be_counted_is_refused(entry: Any, part: str, tmp_path: Path, tiny_model_folder: Path) -> None:
    def allocated() -> None:
        config = config_of(tmp_path, {"path": str(tiny_model_folder)}, entry)
        build_stages(config, make_plan(config).shards)

    with pytest.raises(UserError, match=part):
        allocated()
