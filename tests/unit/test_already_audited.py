"""A scan audits what earlier scans by the same model have not audited: each document once, and none vanishes."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.small_model import WORDS
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ROLES
from pipeline.corpus.documents import text_key
from pipeline.errors import ExitCode, IncompleteError, UserError
from pipeline.plan.description import build_config
from pipeline.results.already_audited import AUDITED_RECORD, ScoringBasis
from pipeline.results.status import run_status
from pipeline.run.plan import make_plan
from pipeline.series.scans import read_schedule
from pipeline.stages.audited_texts import AUDITED_FILE, write_audited_keys
from pipeline.stages.base import StagePlan
from pipeline.stages.local import finish_shards
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts, withdraw_receipt
from ray_jobs.audit import RunResult, run_audit
from ray_jobs.progress import Reporter
from ray_jobs.select import select_again
from tests.helpers.commands import user_error
from tests.helpers.made_up import write_rows
from tests.helpers.signed import sign_status


def text_of(number: int) -> str:
    return f"{number} " + " ".join(WORDS[(7 * number + step) % len(WORDS)] for step in range(5 + number % 9))


def scan(folder: Path, model: Path, name: str, audit: list[int], **described: Any) -> AuditConfig:
    """Write the files of a scan, whose documents are numbers; its configuration."""
    paths = {"audit": folder / f"{name}.jsonl", "unseen": folder / "unseen.jsonl"}
    for role, numbers in (("audit", audit), ("unseen", list(range(1000, 1040)))):
        write_rows(paths[role], ({"id": f"{role}-{number}", "text": text_of(number)} for number in numbers))
    corpus = {role: {"path": str(path), "id": "id"} for role, path in paths.items()}
    given = {"run": str(folder / name), "model": {"path": str(model)}, "corpus": corpus}
    asked = {"detectors": ["loss"], "selections": [{"name": "members", "detectors": ["loss"]}]}
    resources = {"cluster": "local", "shard_documents": 20}
    return build_config({**given, **asked, "resources": resources, "evidence": 0, "near_copies": 1.0, **described})


def audited(run: Path | str) -> list[str]:
    """Ids of the audit documents that a run has scored."""
    store = Store(str(run))
    receipts = [receipt for receipt in read_receipts(store, "score") if receipt.role == "audit"]
    for receipt in receipts:
        assert receipt.n_in == receipt.n_scored + receipt.n_quarantined + receipt.n_judged
    return sorted(itertools.chain(*(store.read_table(r.data, ["doc_id"])["doc_id"].to_pylist() for r in receipts)))


def run(config: AuditConfig) -> tuple[RunResult, list[str]]:
    reporter, lines = Reporter(Console(), quiet=True), []
    reporter.say = lines.append
    return run_audit(config, reporter, texts=False), lines


def names(*numbers: int) -> list[str]:
    return sorted(f"audit-{number}" for number in numbers)


def test_only_audit_documents_are_left_out_and_each_is_counted(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = scan(tmp_path, tiny_model_folder, "scan", list(range(30)))
    store = Store(config.run)
    keys = np.array([text_key(text_of(number)) for number in [*range(12), 1000]], dtype=np.int64)
    (stage,) = plan_stages(StagePlan(config, already_audited=write_audited_keys(store, keys)))
    receipts = list(finish_shards(stage, make_plan(config).shards, store, 1))
    counts = {role: sum(r.n_judged for r in receipts if isinstance(r, Receipt) and r.role == role) for role in ROLES}
    assert counts == {"audit": 12, "unseen": 0, "seen": 0}
    assert audited(config.run) == names(*range(12, 30))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 9, "code": "9.9", "device": "cuda", "batch_tokens": 8, "rows": "other", "against": "ab"}, None),
        ({"detectors": ["loss", "min_k"], "plugins": {"mine.py": "ab"}, "reference_model": "r"}, None),
        ({"reads": {"samples": "ab"}, "adapters": {"fsd": "ab"}}, None),
        ({"model": "m2"}, "model is m2 there and m1 here"),
        ({"dtype": None}, "dtype is none there and float32 here"),
        ({"text_transform": {"dates": "remove"}}, "text_transform is {'dates': 'remove'} there and none here"),
        ({"detectors": ["min_k"]}, "detector loss was never scored there"),
    ],
)
def test_runs_are_alike_in_all_that_the_detectors_of_the_selections_depend_on(
    change: dict[str, Any], difference: str | None, tmp_path: Path
) -> None:
    made_of = {"model": "m1", "dtype": "float32", "max_tokens": 1024, "seed": 0, "detectors": ["loss"]}
    terms = ScoringBasis.required(scan(tmp_path, tmp_path, "scan", [0]), made_of)
    assert terms.difference({**made_of, **change}) == difference


@pytest.mark.slow
@pytest.mark.parametrize(("order", "cluster"), [((2, 0, 1), "local"), ((0, 1, 2), "ray")])
def test_scans_of_a_ledger_audit_each_document_once(
    order: tuple[int, ...], cluster: str, tmp_path: Path, tiny_model_folder: Path, request: pytest.FixtureRequest
) -> None:
    if cluster == "ray":
        request.getfixturevalue("cluster")
    corpora = [list(range(30)), list(range(20, 50)), [*range(10), *range(45, 60)]]
    ledger = str(tmp_path / "ledger")
    met: list[str] = []
    for place in order:
        resources = {"cluster": cluster, "gpus_per_actor": 0, "shard_documents": 20}
        series = {"ledger": ledger, "alpha": 0.2, "horizon": 5}
        described = {"series": series, "against": ledger, "resources": resources}
        config = scan(tmp_path, tiny_model_folder, f"scan-{place}", corpora[place], **described)
        outcome, _ = run(config)
        new = audited(config.run)
        assert outcome.selections[0].n_audit == len(new) == outcome.status.scored - 40
        assert outcome.status.judged == len(corpora[place]) - len(new)
        met += new
    assert sorted(met) == names(*range(60))


@pytest.mark.slow
def test_a_run_is_incremental_to_the_one_before_and_to_what_that_left_out(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    first = scan(tmp_path, tiny_model_folder, "first", list(range(20)))
    second = scan(tmp_path, tiny_model_folder, "second", list(range(30)), against=first.run)
    third = scan(tmp_path, tiny_model_folder, "third", [3, 25, *range(40, 52)], against=second.run)
    for config in (first, second, third):
        outcome, lines = run(config)
    assert audited(second.run) == names(*range(20, 30))
    assert audited(third.run) == names(*range(40, 52))
    assert f"2 audit documents are already audited by {second.run} and left out" in lines
    report = json.loads((tmp_path / "third" / "report" / "report.json").read_text())
    audit = next(role for role in report["documents"] if role["role"] == "audit")
    assert (audit["n_in"], audit["n_scored"], audit["n_judged"]) == (14, 12, 2)
    assert run_status(third.run).judged == outcome.status.judged == 2
    late = scan(tmp_path, tiny_model_folder, "first", list(range(20)), against=second.run)
    assert "started without against" in user_error(run, late)
    other = scan(tmp_path, tiny_model_folder, "other", [25], against=first.run, max_tokens=64)
    assert "max_tokens is 1024 there and 64 here" in user_error(run, other)
    assert not any(Path(config.run, AUDITED_RECORD).exists() for config in (first, other))
    assert run(first)[0].exit_code == ExitCode.DONE


@pytest.mark.slow
def test_a_resumed_scan_keeps_its_set_and_one_without_news_takes_no_place(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    ledger = str(tmp_path / "ledger")
    series = {"ledger": ledger, "alpha": 0.2, "horizon": 4}

    def find_scan(name: str, audit: list[int], model: Path = tiny_model_folder) -> AuditConfig:
        return scan(tmp_path, model, name, audit, series=series, against=ledger)

    _, second, third = scans = [
        find_scan(name, list(numbers))
        for name, numbers in (("first", range(10)), ("second", range(40)), ("third", range(20, 50)))
    ]
    for config in scans:
        run(config)
    assert audited(third.run) == names(*range(40, 50))
    kept = Path(second.run, AUDITED_FILE).read_bytes()
    receipt = next(r for r in read_receipts(Store(second.run), "score") if r.role == "audit" and r.n_judged)
    withdraw_receipt(Store(second.run), "score", receipt.shard)
    outcome, _ = run(second)
    assert Path(second.run, AUDITED_FILE).read_bytes() == kept
    assert audited(second.run) == names(*range(10, 40))
    assert outcome.selections[0].n_audit == 30
    with pytest.raises(UserError, match=f"started with against {ledger}, now none"):
        run(scan(tmp_path, tiny_model_folder, "second", list(range(40)), series=series))

    without = find_scan("without", list(range(15)))
    outcome, lines = run(without)
    assert (outcome.exit_code, outcome.status.state, outcome.selections) == (ExitCode.DONE, "complete", [])
    assert any("15 audit documents are already audited" in line and "nothing is selected" in line for line in lines)
    assert len(read_schedule(Store(ledger)).scans) == 3
    again, _ = run(without)
    assert (again.exit_code, again.selections) == (ExitCode.DONE, [])
    assert len(read_schedule(Store(ledger)).scans) == 3

    shutil.rmtree(third.run)
    shutil.copytree(tiny_model_folder, tmp_path / "model")  # the same weights with another digest
    settings = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**settings, "comment": "another"}))
    other = find_scan("other", list(range(25)), tmp_path / "model")
    _, lines = run(other)
    assert audited(other.run) == names(*range(25))
    said = [line for line in lines if line.startswith("against: a run is not counted")]
    assert ["scored differently" in line for line in said] == [True, True, False]
    assert "is not a run directory" in said[2]


@pytest.mark.slow
def test_what_is_no_finished_run_is_refused_and_what_one_quarantined_was_not_audited(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    nothing = scan(tmp_path, tiny_model_folder, "one", list(range(5)), against=str(tmp_path / "nothing"))
    assert "neither a run directory" in user_error(run, nothing)
    itself = scan(tmp_path, tiny_model_folder, "one", list(range(5)), against=str(tmp_path / "one"))
    assert "is this run: name" in user_error(run, itself)
    first = scan(tmp_path, tiny_model_folder, "first", list(range(5)), error_budget=1)
    path = tmp_path / "first.jsonl"
    path.write_text(path.read_text() + json.dumps({"id": "audit-0", "text": text_of(7)}) + "\n")
    run(first)
    second = scan(tmp_path, tiny_model_folder, "second", [1, 7, 8], against=first.run)
    run(second)
    assert audited(second.run) == names(7, 8), "a quarantined document was not audited"
    status = Path(first.run, "status.json")
    status.write_text(status.read_text().replace('"complete"', '"incomplete"'))
    sign_status(Store(first.run))
    with pytest.raises(IncompleteError, match="is not complete"):
        run(scan(tmp_path, tiny_model_folder, "two", list(range(9)), against=first.run))


@pytest.mark.slow
def test_a_run_that_has_scored_and_answered_nothing_of_the_kind_has_audited_nothing(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    first = scan(tmp_path, tiny_model_folder, "first", list(range(5)), selections=[], detectors=["loss", "zlib"])
    run(first)
    for _ in range(2):
        with pytest.raises(UserError, match="no selection of direction members with detector loss"):
            run(scan(tmp_path, tiny_model_folder, "second", list(range(9)), against=first.run))
        select_again(first.run, ["selections=[{name: other, detectors: [zlib]}]"])
