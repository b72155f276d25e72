"""A file of a run directory that is not as it was filed: selection refuses it by name, and the run makes it again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.plain_loop import process
from pipeline.errors import DamagedError, UserError
from pipeline.models.load import RECORD, check_adapter_digests
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from pipeline.stages.base import Placement
from pipeline.stages.process import filed_rows
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed, read_receipts, receipt_name
from ray_jobs.select import select_again
from tests.helpers.commands import refusal
from tests.helpers.finished import rows, run
from tests.helpers.made_up import sentence, write_audit

SAMPLED = ["loss", {"samia": {"draws": 2, "candidate_words": "reference"}}]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The YAML of a run of several shards, with a document in quarantine."""
    root = tmp_path_factory.mktemp("finished")
    path = write_audit(root, tiny_model_folder, [*(sentence(i) for i in range(40)), ""], error_budget=0.5)
    run(path)
    return path


@pytest.fixture
def audit(finished: Path, tmp_path: Path) -> Path:
    """The YAML of a copy of that run beside its inputs."""
    shutil.copytree(finished.parent, tmp_path / "copy")
    path = tmp_path / "copy/audit.yaml"
    path.write_text(path.read_text().replace(str(finished.parent), str(path.parent)))
    return path


def receipts_of(audit: Path, stage: str = "score") -> list[Receipt]:
    return list(read_receipts(Store(str(audit.parent / "run")), stage))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(0, len(table) // 2), path, compression="zstd")


def test_a_score_file_that_is_not_the_one_that_was_filed_is_refused_and_made_again(
    audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = audit.parent / "run"
    scores, answer = rows(folder), (folder / "selection/members/selected.parquet").read_bytes()
    damages: list[Callable[[Path, Path], object]] = [
        lambda path, other: cut(path),
        lambda path, other: shutil.copyfile(other, path),
        lambda path, other: flip(path, 8 * (path.stat().st_size // 2)),
        lambda path, other: path.unlink(),
    ]
    for damage in damages:
        before = {receipt.shard: receipt for receipt in receipts_of(audit)}
        first, second, *_ = before.values()
        damage(folder / first.data, folder / second.data)
        error = refusal(capsys, "select", folder)
        assert first.data in error
        assert "seenset run writes it again" in error
        run(audit)
        after = {receipt.shard: receipt for receipt in receipts_of(audit)}
        assert {shard for shard in before if after[shard] != before[shard]} == {first.shard}
        assert rows(folder) == scores
        assert (folder / "selection/members/selected.parquet").read_bytes() == answer


def test_a_damaged_receipt_and_that_of_another_shard_are_refused_and_made_again(audit: Path) -> None:
    folder = audit.parent / "run"
    scores, receipt = rows(folder), receipts_of(audit)[0]
    first, second, *_ = (folder / receipt_name("score", receipt.shard) for receipt in receipts_of(audit))
    wrong = first.read_text().replace(f'"n_in": {receipt.n_in}', f'"n_in": {receipt.n_in + 1}')
    for text, line in ((wrong, ""), (second.read_text(), f"it is the receipt of shard {second.stem}")):
        first.write_text(text)
        with pytest.raises(UserError, match=rf"{first.name} is damaged: {line}.*seenset run writes it again"):
            select_again(str(folder), [])
        run(audit)
        assert rows(folder) == scores


@pytest.mark.slow
def test_a_damaged_quarantine_file_is_refused_and_made_again(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = audit.parent / "run"
    (receipt,) = (receipt for receipt in receipts_of(audit) if receipt.quarantine)
    path = folder / str(receipt.quarantine)
    flip(path, 8 * (path.stat().st_size // 2))
    for command in ("select", "report"):
        assert str(receipt.quarantine) in refusal(capsys, command, folder)
    run(audit)
    (receipt,) = (receipt for receipt in receipts_of(audit) if receipt.quarantine)
    assert pq.read_table(folder / str(receipt.quarantine))["reason"].to_pylist() == ["empty"]


def test_receipts_without_digests_are_refused_with_the_version_that_wrote_them(audit: Path) -> None:
    folder = audit.parent / "run"
    for receipt in receipts_of(audit):
        path = folder / receipt_name("score", receipt.shard)
        value = json.loads(path.read_text())
        older = {key: value[key] for key in value if key not in ("files", "documents", "digest")}
        path.write_text(json.dumps({**older, "fingerprint": {**value["fingerprint"], "code": "0.3.0"}}))
    for again in (lambda: select_again(str(folder), []), lambda: run(audit)):
        with pytest.raises(UserError, match=r"was written by seenset 0\.3\.0, which kept no digests"):
            again()


@pytest.mark.slow
def test_samples_that_are_damaged_are_made_again_where_scoring_reads_them(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    sampled = write_audit(tmp_path, tiny_model_folder, 12, 12, detectors=SAMPLED, resources={"shard_bytes": 600})
    run(sampled)
    folder = tmp_path / "run"
    (stage,) = {str(p.parent.relative_to(folder / "receipts")) for p in (folder / "receipts/sample").rglob("*.json")}
    scores, samples, receipts = rows(folder), rows(folder, stage), receipts_of(sampled, stage)
    for receipt in receipts[:2]:
        path = folder / receipt.data
        flip(path, 8 * (path.stat().st_size // 2))
    (folder / receipt_name("score", receipts[0].shard)).unlink()
    run(sampled)
    assert rows(folder) == scores
    remade = receipts_of(sampled, stage)
    assert [new.data != old.data for new, old in zip(remade, receipts, strict=True)][:3] == [True, False, False]
    (folder / receipts[1].data).write_bytes((folder / receipts[2].data).read_bytes())
    (folder / receipt_name("score", receipts[1].shard)).unlink()
    run(sampled)
    assert rows(folder, stage) == samples


@pytest.mark.slow
def test_a_damaged_adapter_is_trained_again_unless_documents_were_scored_with_it(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    fsd = {"documents": 4, "epochs": 1, "dtype": "float32"}
    path = write_audit(tmp_path, tiny_model_folder, 10, 10, detectors=["loss", "fsd"], fsd=fsd, selections=[])
    run(path)
    folder = tmp_path / "run"
    scores = rows(folder)
    (weights,) = folder.glob("adapters/*/adapter_model.safetensors")
    trained = weights.read_bytes()
    flip(weights, 8 * (len(trained) - 100))
    with pytest.raises(UserError, match=r"safetensors is not what was trained, and documents were scored"):
        run(path)
    shutil.rmtree(folder / "receipts/score")
    run(path)
    assert weights.read_bytes() == trained
    assert rows(folder) == scores
    record = weights.with_name(RECORD)
    record.write_text(record.read_text().replace('"epochs": 1', '"epochs": 2'))
    with pytest.raises(DamagedError, match=r"training\.json is not what was written"):
        check_adapter_digests(weights.parent)


def test_a_file_of_more_draws_holds_those_that_are_new(tmp_path: Path, tiny_model_folder: Path) -> None:
    path = write_audit(tmp_path, tiny_model_folder, 6, detectors=SAMPLED, selections=[])
    made = {}
    for name, all_draws in (("step by step", (2, 5, 3)), ("at once", (5,))):
        for draws in all_draws:
            config = load_config(str(path), [f"run={tmp_path / name}", f"detectors.1.samia.draws={draws}"])
            stage, shard, store = plan_stages(config)[0], make_plan(config).shards[0], Store(config.run)
            receipt = process(stage, stage.make(stage, Placement()), shard, store)
            made[name, draws] = receipt, [len(row["continuations"]) for row in read_filed(store, receipt).to_pylist()]
        made[name] = filed_rows(store, receipt)
    assert made["step by step", 5][1] == [3] * len(made["at once"])
    assert made["step by step", 5][0].earlier == (made["step by step", 2][0].data,)
    assert made["step by step", 3][1] == []
    assert made["step by step"] == made["at once"]
