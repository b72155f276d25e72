"""A file of a run directory that is not as it was filed: selection refuses it by name, and the run makes it again."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished import rows, run
from made_up import sentence, write_audit

from pipeline.audit.description import load_config
from pipeline.audit.plan import make_plan
from pipeline.audit.stages import stages_of
from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.shards import plan_shards
from pipeline.errors import DamagedError, ExitCode, UserError
from pipeline.stages import local
from pipeline.stages.base import Placement
from pipeline.stages.process import process
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt, read_receipts, receipt_name
from pipeline.store.tables import read_filed
from ray_jobs.audit import select_again
from ray_jobs.cli import main

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


def refusal(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that refuses a run writes to standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([command, str(folder)])
    assert ended.value.code == ExitCode.USER_ERROR
    return capsys.readouterr().err


def cut(path: Path, other: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(0, len(table) // 2), path, compression="zstd")


def exchange(path: Path, other: Path) -> None:
    shutil.copyfile(other, path)


def spoil(path: Path, other: Path) -> None:
    flip(path, 8 * (path.stat().st_size // 2))


def lose(path: Path, other: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut, exchange, spoil, lose])
def test_a_score_file_that_is_not_the_one_that_was_filed_is_refused_and_made_again(
    damage: Callable[[Path, Path], None], audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = audit.parent / "run"
    scores, answer = rows(folder), (folder / "selection/members/selected.parquet").read_bytes()
    before = {receipt.shard: receipt for receipt in receipts_of(audit)}
    first, second, *_ = before.values()
    damage(folder / first.data, folder / second.data)
    error = refusal("select", folder, capsys)
    assert error.count("\n") == 1
    assert first.data in error
    assert "seenset run makes it again" in error
    run(audit)
    after = {receipt.shard: receipt for receipt in receipts_of(audit)}
    assert {shard for shard in before if after[shard] != before[shard]} == {first.shard}
    assert rows(folder) == scores
    assert (folder / "selection/members/selected.parquet").read_bytes() == answer


def test_no_flipped_bit_of_a_score_file_is_read(audit: Path) -> None:
    store = Store(str(audit.parent / "run"))
    receipt = receipts_of(audit)[0]
    path = Path(store.path(receipt.data))
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 300):
        flip(path, bit)
        with pytest.raises(DamagedError, match=receipt.data):
            read_filed(store, receipt, ["loss"])
        path.write_bytes(whole)


def test_no_flipped_bit_changes_what_a_receipt_says(audit: Path) -> None:
    store = Store(str(audit.parent / "run"))
    receipt = receipts_of(audit)[0]
    path = Path(store.path(receipt_name("score", receipt.shard)))
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        flip(path, bit)
        with pytest.raises(UserError, match="damaged"):
            read_receipt(store, "score", receipt.shard)
        path.write_bytes(whole)


def test_a_damaged_receipt_is_refused_and_made_again(audit: Path) -> None:
    folder = audit.parent / "run"
    scores, receipt = rows(folder), receipts_of(audit)[0]
    path = folder / receipt_name("score", receipt.shard)
    path.write_text(path.read_text().replace(f'"n_in": {receipt.n_in}', f'"n_in": {receipt.n_in + 1}'))
    with pytest.raises(UserError, match=rf"{receipt.shard}.json is damaged: .*seenset run makes it again"):
        select_again(str(folder), [])
    run(audit)
    assert rows(folder) == scores


def test_the_receipt_of_another_shard_is_no_receipt(audit: Path) -> None:
    folder = audit.parent / "run"
    first, second, *_ = (folder / receipt_name("score", receipt.shard) for receipt in receipts_of(audit))
    shutil.copyfile(second, first)
    with pytest.raises(UserError, match=f"{first.name} is damaged: it is the receipt of shard {second.stem}"):
        select_again(str(folder), [])


def test_a_damaged_quarantine_file_is_refused_and_made_again(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = audit.parent / "run"
    (receipt,) = (receipt for receipt in receipts_of(audit) if receipt.quarantine)
    path = folder / str(receipt.quarantine)
    flip(path, 8 * (path.stat().st_size // 2))
    for command in ("select", "report"):
        assert str(receipt.quarantine) in refusal(command, folder, capsys)
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


@pytest.fixture
def sampled(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """A finished run whose scores are made of samples."""
    texts = [[sentence(at + i) for i in range(12)] for at in (0, 1000)]
    path = write_audit(tmp_path, tiny_model_folder, *texts, detectors=SAMPLED, resources={"shard_bytes": 600})
    run(path)
    return path


def test_samples_that_are_damaged_are_made_again_where_scoring_reads_them(
    sampled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sampled.parent / "run"
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


# --- inputs


def edit(path: Path, number: int) -> Callable[[], None]:
    """Change one word of a row at equal size; returns what puts it back."""
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    row = json.loads(lines[number])
    row["text"] = row["text"][:-3] + row["text"][-3:].upper()
    lines[number] = json.dumps(row).encode()
    changed = b"\n".join(lines)
    assert len(changed) == len(whole) != 0
    assert changed != whole
    path.write_bytes(changed)

    def put_back() -> None:
        path.write_bytes(whole)

    return put_back


def long_audit(folder: Path, model: Path, **settings: Any) -> Path:
    """An audit of one large file, so that an edit in its middle shows at neither end."""
    texts = [sentence(i, 2000) for i in range(20)]
    return write_audit(folder, model, texts, max_tokens=16, resources={"shard_bytes": 60_000}, **settings)


def test_an_input_that_was_edited_in_its_middle_at_equal_size_is_seen_on_resume(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    path = long_audit(tmp_path, tiny_model_folder)
    run(path)
    source, folder = tmp_path / "audit.jsonl", tmp_path / "run"
    assert source.stat().st_size > 3 * (1 << 16)
    before = {p.name: p.read_bytes() for p in (folder / "receipts/score").iterdir()}
    (folder / "receipts/score/audit-000000.json").unlink()
    put_back = edit(source, 10)
    for _ in range(2):  # refused once, it is refused again
        with pytest.raises(UserError, match=r"audit\.jsonl changed since stage score read it \(shard audit-00000"):
            run(path)
    put_back()
    run(path)
    after = {p.name: p.read_bytes() for p in (folder / "receipts/score").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"audit-000000.json"}


def test_an_input_that_was_edited_between_two_stages_is_seen(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = load_config(str(write_audit(tmp_path, tiny_model_folder, detectors=SAMPLED)), [])
    shard, *_ = make_plan(config).shards
    sampling, scoring = stages_of(config)
    store = Store(config.run)
    process(sampling, sampling.make(sampling, Placement()), shard, store)
    edit(tmp_path / "audit.jsonl", 1)
    with pytest.raises(UserError, match=r"audit\.jsonl changed since stage sample/.* read it"):
        process(scoring, scoring.make(scoring, Placement()), shard, store)
    assert not receipts_of(tmp_path / "audit.yaml")


def test_an_input_that_is_edited_while_a_run_reads_it_gives_no_answer(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = long_audit(tmp_path, tiny_model_folder)
    finished: list[str] = []

    def edited(stage: Any, worker: Any, shard: Any, *arguments: Any) -> Receipt:
        receipt = process(stage, worker, shard, *arguments)
        finished.append(shard.id)
        if len(finished) == 1:
            edit(tmp_path / "audit.jsonl", 1)
        return receipt

    monkeypatch.setattr(local, "process", edited)
    with pytest.raises(UserError, match=r"audit\.jsonl changed since stage score read it \(shard audit-000000\)"):
        run(path)
    assert not (tmp_path / "run/selection").exists()


# --- Parquet footers


def footer_counts(path: Path) -> Iterator[int]:
    """Places in a file of one row group of 5,000 rows where its footer says 5,000, as Thrift writes an i64."""
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    place = data.find(b"\x16" + zigzag(5000), start)
    while place >= 0:
        yield place + 1
        place = data.find(b"\x16" + zigzag(5000), place + 1)


def zigzag(count: int) -> bytes:
    value, out = 2 * count, b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


FILE, COLUMN, GROUP = range(3)
"""The places, in their order."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A Parquet file of 5,000 rows and one column."""
    path = tmp_path / "audit.parquet"
    pq.write_table(pa.table({"text": [f"number {i} of many" for i in range(5000)]}), path, write_statistics=False)
    assert len(list(footer_counts(path))) == 3
    return path


def say(path: Path, rows: int, places: tuple[int, ...]) -> None:
    data = bytearray(path.read_bytes())
    for place in [list(footer_counts(path))[number] for number in places]:
        data[place : place + 2] = zigzag(rows)
    path.write_bytes(data)


@pytest.mark.parametrize("count", [2500, 8000])
@pytest.mark.parametrize("places", [(FILE,), (GROUP,), (FILE, GROUP)])
def test_a_footer_that_contradicts_itself_is_refused_by_name(table: Path, count: int, places: tuple[int, ...]) -> None:
    say(table, count, places)
    with pytest.raises(
        UserError, match=rf"audit\.parquet is damaged: its footer says .*{count if FILE in places else 5000}"
    ):
        shards_of(table)


def shards_of(path: Path) -> list[Any]:
    corpus = CorpusConfig.model_validate({"audit": {"path": str(path)}})
    return plan_shards(corpus, find_inputs(corpus), ResourcesConfig())


@pytest.mark.parametrize("places", [(GROUP,), (FILE, GROUP), (FILE, COLUMN, GROUP)])
def test_a_shard_that_gives_fewer_rows_than_were_planned_fails_by_name(table: Path, places: tuple[int, ...]) -> None:
    *_, last = shards_of(table)
    say(table, 2500, places)
    with pytest.raises(UserError, match=r"audit\.parquet is damaged"):
        list(read_shard(last))


def test_rows_that_a_footer_has_too_many_of_fail_by_name(table: Path) -> None:
    say(table, 8000, (FILE, COLUMN, GROUP))
    shards = shards_of(table)
    assert shards[-1].stop == 8000
    read = 0
    for shard in shards:
        if shard.stop <= 5000:
            read += len(list(read_shard(shard)))
            continue
        with pytest.raises(UserError, match=r"audit\.parquet is damaged"):
            list(read_shard(shard))
    assert read > 0


def test_a_file_that_became_shorter_than_it_was_planned_fails_by_name(tmp_path: Path, tiny_model_folder: Path) -> None:
    *_, last = make_plan(load_config(str(write_audit(tmp_path, tiny_model_folder)), [])).shards
    path = Path(last.path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"unseen\.jsonl is damaged after row \d+: it ends at byte \d+"):
        list(read_shard(last))
