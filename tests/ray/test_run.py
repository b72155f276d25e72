"""`seenset run`: shards in, receipts out, and the same answer however it came about."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from commands import user_error
from finished import rows, run
from made_up import sentence, write_audit, write_jsonl
from rich.console import Console

from pipeline.audit.description import load_config
from pipeline.audit.status import run_status
from pipeline.audit.summary import read_summary
from pipeline.config.audit import AuditConfig
from pipeline.errors import ExitCode, IncompleteError, UserError
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from ray_jobs import start
from ray_jobs.audit import Outcome, run_audit
from ray_jobs.progress import Reporter
from ray_jobs.select import select_again

MakeAudit = Callable[..., Path]
Rerun = Callable[..., Outcome]


def digest(folder: Path) -> dict[str, str]:
    left_out = ("history.jsonl", "digests.json")  # times, and the manifest with the name of the run directory
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in left_out)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def scores(folder: Path) -> dict[str, dict[str, float]]:
    return {name: {key: row[key] for key in ("loss", "min_k", "zlib")} for name, row in rows(folder).items()}


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The folder of an audit that has run: tests that go on with it take a copy."""
    folder = tmp_path_factory.mktemp("audit")
    run(write_audit(folder, tiny_model_folder))
    return folder


@pytest.fixture
def finished(run_once: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs the finished audit again in a copy of its run directory: (*overrides, **arguments) -> outcome."""
    shutil.copytree(run_once / "run", tmp_path / "run")
    return partial(run, run_once / "audit.yaml", f"run={tmp_path / 'run'}")


@pytest.fixture
def moved(run_once: Path) -> Iterator[Path]:
    """Where the audited file of the finished audit was: it is away while the test runs."""
    path, away = run_once / "audit.jsonl", run_once / "away.jsonl"
    shutil.move(path, away)
    yield path
    shutil.move(away, path)


PLACES = {
    "here": ("resources.cluster=local", "resources.actors=1"),
    "in threads": ("resources.cluster=local", "resources.actors=auto"),
    "two actors": ("resources.cluster=ray", "resources.actors=2"),
}
ONE_ACTOR = ("resources.cluster=ray", "resources.actors=1")


@pytest.mark.usefixtures("cluster")
def test_every_document_is_scored_once_and_the_same_wherever_and_also_when_one_resumes_the_other(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    path = make_audit(detectors=["loss", "min_k", "zlib", "gradient_norm"])
    results = {}
    for name, place in PLACES.items():
        folder = tmp_path / name
        outcome = run(path, f"run={folder}", *place)
        assert outcome.exit_code == ExitCode.DONE
        assert outcome.status.documents == outcome.status.scored == 100
        assert outcome.status.shards > 4
        results[name] = (digest(folder / "selection"), rows(folder))
        assert len(results[name][1]) == 100
    assert all(result == results["here"] for result in results.values())
    for begun, place in (("here", ONE_ACTOR), ("two actors", PLACES["in threads"])):
        folder = tmp_path / begun
        for receipt in sorted((folder / "receipts" / "score").glob("*.json"))[::2]:
            receipt.unlink()
        shutil.rmtree(folder / "selection")
        run(path, f"run={folder}", *place)
        assert (digest(folder / "selection"), rows(folder)) == results["here"]


@pytest.mark.slow
def test_a_large_corpus_is_scored_beside_its_checks_to_the_same_bytes_and_stops_where_they_say_so(
    run_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "WAITING_TOKENS", 0)
    here = (f"run={tmp_path / 'beside'}", "resources.actors=2")
    assert run(run_once / "audit.yaml", *here).exit_code == ExitCode.DONE
    for part in ("selection", "diagnostics"):
        assert digest(tmp_path / "beside" / part) == digest(run_once / "run" / part)
    both = [f"corpus.unseen.path={run_once / 'audit.jsonl'}", f"run={tmp_path / 'shared'}", "resources.actors=2"]
    with pytest.raises(UserError, match="near copies"):
        run(run_once / "audit.yaml", *both)
    assert json.loads((tmp_path / "shared/status.json").read_text())["state"] == "failed"


def test_another_alpha_is_answered_without_a_word_of_damage(run_once: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_once / "run", folder)
    lines: list[str] = []
    reporter = Reporter(Console(), quiet=True)
    reporter.say = lines.append  # type: ignore[method-assign]
    config = load_config(str(run_once / "audit.yaml"), [f"run={folder}", "selections.0.alpha=0.3"])
    assert run_audit(config, reporter).exit_code == ExitCode.DONE
    assert "selecting" in lines
    assert not [line for line in lines if "damaged" in line]
    summary = folder / "selection/members/summary.json"
    summary.write_text(summary.read_text().replace('"alpha": 0.3', '"alpha": 0.1'))
    run_audit(config, reporter)
    assert [line for line in lines if "summary.json is damaged" in line]


def test_the_manifest_says_how_gradient_norms_were_taken(make_audit: MakeAudit, tmp_path: Path) -> None:
    path = make_audit(detectors=["loss", "min_k", "zlib", "gradient_norm"])
    for _ in range(2):
        assert run(path).exit_code == ExitCode.DONE
        found = json.loads((tmp_path / "run" / "manifest.json").read_text())
        assert (found["gradient"]["method"], found["gradient"]["quantised"]) == ("batched", 0)
        assert [each["kind"] for each in found["passes"]] == ["forward", "gradient"]


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.dtype=bfloat16", "dtype: float32 then, bfloat16 now"),
        ("max_tokens=8", "max_tokens: 1024 then, 8 now"),
        ("detectors=[loss, zlib]", "detectors"),
        ("resources.shard_bytes=999", "resources.shard_bytes 1500, now 999"),
    ],
)
def test_a_setting_that_changes_scores_is_refused_on_resume_by_name(finished: Rerun, override: str, field: str) -> None:
    assert field in user_error(finished, override)


def test_an_input_that_changed_is_refused_on_resume(finished: Rerun, moved: Path) -> None:
    text = moved.with_name("away.jsonl").read_text()
    moved.write_text(text.replace("Text 0", "Text X"))
    with pytest.raises(UserError, match=r"rows: .*audit-000000"):
        finished()


BAD: list[tuple[Any, str]] = [
    ("", "empty"),
    (" \n\t ", "empty"),
    (None, "not_text"),
    (7, "not_text"),
    ("a", "too_short"),
    ("lone \ud800 surrogate", "undecodable"),
]


def test_bad_documents_are_quarantined_with_their_reason_and_none_vanishes(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    good = [sentence(i) for i in range(30)]
    special = ["nul \x00 in the middle of a text", "<script>alert('x')</script> is what it says", "word " * 400_000]
    path = make_audit(
        [*good, *special, *(text for text, _ in BAD)], error_budget=0.5, resources={"shard_bytes": 1 << 20, "actors": 1}
    )
    outcome = run(path, fail_if_selected=False)
    assert outcome.status.documents == 30 + 3 + len(BAD) + 40
    assert outcome.status.quarantined == len(BAD)
    folder = tmp_path / "run"
    quarantined = {}
    for receipt in read_receipts(Store(str(folder)), "score"):
        if receipt.quarantine:
            quarantined.update(
                {r["doc_id"]: r["reason"] for r in pq.read_table(folder / receipt.quarantine).to_pylist()}
            )
    assert quarantined == {f"audit-{33 + i}": reason for i, (_, reason) in enumerate(BAD)}
    summary = read_summary(Store(str(folder)), "members")
    assert summary == outcome.selections[0]
    assert (summary.n_audit, summary.n_quarantined) == (33 + len(BAD), len(BAD))
    rows = [r for p in (folder / "selection/members/documents").glob("*.parquet") for r in pq.read_table(p).to_pylist()]
    verdicts = {r["doc_id"]: r for r in rows}
    assert len(rows) == len(verdicts) == 33 + len(BAD)
    nothing = {"p_value": 1.0, "selected": False, "loss": None}
    rows_of = {name: int(name.removeprefix("audit-")) for name in quarantined}
    for name, row in rows_of.items():
        assert verdicts[name] == {"doc_id": name, **nothing, "source": str(tmp_path / "audit.jsonl"), "row": row}
    html = (folder / "report/report.html").read_text()
    assert "<script>alert" not in html


def test_repeated_ids_are_quarantined_within_and_across_shards(make_audit: MakeAudit, tmp_path: Path) -> None:
    path = make_audit(error_budget=0.5)
    rows = [{"id": f"d{i % 50}" if i != 3 else "d2", "text": sentence(i)} for i in range(60)]
    (tmp_path / "audit.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = run(path)
    assert outcome.selections[0].n_quarantined == 10
    assert outcome.selections[0].n_audit == 60
    with pytest.raises(IncompleteError, match=r"10 of 100 documents were quarantined \(duplicate_id 10\)"):
        run(path, "error_budget=0.01")


def test_the_error_budget_ends_a_run_before_any_selection_and_a_raised_one_goes_on(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    path = make_audit([*(sentence(i) for i in range(40)), "", "", ""])
    with pytest.raises(IncompleteError, match="empty 3") as caught:
        run(path)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "run/selection").exists()
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "incomplete"
    outcome = run(path, "error_budget=0.1")
    assert outcome.status.documents_per_s == 0
    assert outcome.selections[0].n_quarantined == 3


def test_documents_that_calibration_and_audit_share_stop_the_run_or_are_dropped(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    shared = [sentence(1000 + i) for i in range(5)]
    longer = " ".join(sentence(1010).split()[:8]) + " and then it goes on in another way"
    path = make_audit([*(sentence(i) for i in range(40)), *(t.upper() for t in shared), longer])
    with pytest.raises(UserError, match="5 of 40 unseen documents are near copies of audit documents") as caught:
        run(path)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run/manifest.json").exists(), "before any model is read"
    outcome = run(path, "overlap=drop")
    assert outcome.selections[0].n_calibration == 35
    assert outcome.selections[0].n_audit == 46
    overlap = outcome.selections[0].diagnostics.overlap
    assert (overlap.ok, overlap.n_calibration, overlap.n_equal, overlap.n_audit) == (True, 5, 5, 5)
    assert "(first: audit-40 and unseen-0, 100%;" in overlap.sentence
    filed = list((tmp_path / "run/diagnostics").glob("documents-*.json"))
    before = json.loads(filed[0].read_text())
    test = json.loads((tmp_path / "run/diagnostics/blind-unseen.json").read_text())
    assert before["blind"]["unseen"] == {key: test[key] for key in test if key not in ("file", "digest")}


def test_a_damaged_file_leaves_the_other_shards_scored(make_audit: MakeAudit, tmp_path: Path) -> None:
    import gzip

    path = make_audit()
    whole = gzip.compress(write_and_read(tmp_path / "long.jsonl", [sentence(5000 + i) for i in range(2000)]))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) * 2 // 3])
    both = f'corpus.audit.path=["{tmp_path}/audit.jsonl", "{tmp_path}/cut.jsonl.gz"]'
    with pytest.raises(IncompleteError, match=r"cut\.jsonl\.gz is damaged after row"):
        run(path, both)
    assert run_status(str(tmp_path / "run")).state == "incomplete"
    (tmp_path / "cut.jsonl.gz").write_bytes(
        gzip.compress(write_and_read(tmp_path / "more.jsonl", [sentence(5000 + i) for i in range(5)]))
    )
    outcome = run(path, both)
    assert outcome.status.documents == 105


def write_and_read(path: Path, texts: list[str]) -> bytes:
    write_jsonl(path, texts)
    return path.read_bytes()


def test_both_directions_and_many_selections_read_the_same_scores(make_audit: MakeAudit, tmp_path: Path) -> None:
    seen = write_jsonl(tmp_path / "seen.jsonl", [sentence(3000 + i) for i in range(30)])
    path = make_audit()
    selections = [
        {"name": f"{direction}-{procedure}", "direction": direction, "detectors": [column], "procedure": procedure}
        for direction in ("members", "clean")
        for procedure in ("bh", "by", "storey", "ptdi")
        for column in ("min_k",)
    ]
    config = load_config(str(path), [f'corpus.seen={{"path": "{seen}", "id": "id"}}'])
    config = AuditConfig.model_validate({**config.model_dump(), "selections": selections})
    outcome = run_audit(config, Reporter(Console(), quiet=True))
    assert [s.name for s in outcome.selections] == [s["name"] for s in selections]
    for summary in outcome.selections:
        assert summary.n_calibration == (40 if summary.direction == "members" else 30)
        assert summary.strict.guarantee == "finite-sample"
        assert summary.minimum_selectable >= 1


@pytest.mark.usefixtures("finished", "moved")
def test_select_answers_anew_without_a_model(tmp_path: Path) -> None:
    before = digest(tmp_path / "run" / "scores")
    summaries = select_again(
        str(tmp_path / "run"), ["selections.0.alpha=0.9", "selections.0.procedure=ptdi"], texts=False
    )
    assert summaries[0].alpha == 0.9
    assert summaries[0].procedure == "ptdi"
    assert digest(tmp_path / "run" / "scores") == before
    with pytest.raises(UserError, match="max_tokens needs seenset run"):
        select_again(str(tmp_path / "run"), ["max_tokens=3"])
    with pytest.raises(UserError, match="is not a run directory"):
        select_again(str(tmp_path / "nothing"), [])


def test_a_sample_says_that_it_is_one_and_cannot_be_mixed_with_the_whole(make_audit: MakeAudit, tmp_path: Path) -> None:
    path = make_audit()
    outcome = run(path, limit=20)
    assert outcome.status.documents == 40
    assert outcome.selections[0].limit == 20
    assert "sample" in (tmp_path / "run/report/report.html").read_text().lower()
    with pytest.raises(UserError, match="--limit 20"):
        run(path)


def test_selected_documents_name_their_source_and_row(make_audit: MakeAudit, tmp_path: Path) -> None:
    path = make_audit([sentence(i, 80) for i in range(60)])
    outcome = run(path, "selections.0.detectors=[zlib]", fail_if_selected=True)
    table = pq.read_table(tmp_path / "run/selection/members/selected.parquet")
    assert len(table) == outcome.selections[0].n_selected > 0
    assert outcome.exit_code == ExitCode.UNSUPPORTED, "long texts among short ones: their words give them away"
    assert table.column_names == ["doc_id", "p_value", "zlib", "source", "row", "text_key", "excerpt"]
    for row in table.to_pylist():
        assert row["doc_id"] == f"audit-{row['row']}"
        assert row["source"] == str(tmp_path / "audit.jsonl")


def test_a_model_that_gives_nan_selects_nothing_and_says_why(
    make_audit: MakeAudit, tiny_model_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "nan-model"
    shutil.copytree(tiny_model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = make_audit(model={"path": str(folder)})
    with pytest.raises(IncompleteError, match=r"100 of 100 documents were quarantined \(non_finite_score 100\)"):
        run(path)
    with pytest.raises(UserError, match="no calibration documents"):
        run(path, "error_budget=1")


def test_without_calibration_documents_nothing_is_decided(make_audit: MakeAudit, tmp_path: Path) -> None:
    path = make_audit(None, ["", " "], error_budget=0.5)
    with pytest.raises(UserError, match="no calibration documents") as caught:
        run(path)
    assert caught.value.exit_code == 2
    (tmp_path / "unseen.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=r"corpus\.unseen holds no documents"):
        run(path)


POISON_MODEL = """
import os
from transformers import LlamaForCausalLM, LlamaModel

class PoisonModel(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        if (input_ids == {token}).any():
            os._exit(1)
        return super().forward(input_ids=input_ids, **kwargs)

class PoisonForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = PoisonModel(config)
        self.post_init()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_document_that_kills_its_worker_is_found_and_quarantined(
    make_audit: MakeAudit, tiny_model_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    token = AutoTokenizer.from_pretrained(tiny_model_folder)("~")["input_ids"][0]
    folder = tmp_path / "poison-model"
    shutil.copytree(tiny_model_folder, folder)
    (folder / "modeling_poison.py").write_text(POISON_MODEL.format(token=token))
    settings = json.loads((folder / "config.json").read_text())
    settings |= {
        "auto_map": {"AutoModelForCausalLM": "modeling_poison.PoisonForCausalLM"},
        "architectures": ["PoisonForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(settings))
    texts = [sentence(i) for i in range(12)]
    texts[5] = "this one ~ kills whoever reads it"
    path = make_audit(
        texts,
        model={"path": str(folder), "trust_remote_code": True},
        error_budget=0.5,
        resources={"shard_bytes": 1 << 20, "cluster": "ray"},
    )
    outcome = run(path)
    assert outcome.status.quarantined == 1
    assert outcome.status.scored == 51
    store = Store(str(tmp_path / "run"))
    receipt = next(r for r in read_receipts(store, "score") if r.quarantine)
    row = pq.read_table(tmp_path / "run" / str(receipt.quarantine)).to_pylist()[0]
    assert (row["row"], row["reason"]) == (5, "model_error")
    assert "its worker was killed" in row["message"]
