"""Known documents are divided between adapters and calibration, and never shared."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.plain_loop import process
from benchmarks.small_model import WORDS
from pipeline.config.audit import AuditConfig
from pipeline.corpus.documents import text_key
from pipeline.errors import UserError
from pipeline.plan.allocation import Parts, allocate
from pipeline.plan.description import build_config
from pipeline.plan.forecast import forecast
from pipeline.run.plan import make_plan
from pipeline.stages.base import Placement
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from tests.helpers.commands import user_error

Files = dict[str, str]
Audit = Callable[..., AuditConfig]


def write(path: Path, texts: Sequence[str], groups: Sequence[str] | None = None) -> str:
    rows = [{"text": text, "group": groups[i] if groups else None} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def audit(tiny_model_folder: Path) -> Audit:
    """(files of each role, **settings) -> an audit by fsd."""

    def make(files: Files, **settings: Any) -> AuditConfig:
        roles = {role: {"path": path, "group": "group"} for role, path in files.items()}
        plain = {"run": "run", "model": {"path": str(tiny_model_folder)}, "corpus": roles, "detectors": ["fsd"]}
        return build_config({**plain, **settings})

    return make


def parts(config: AuditConfig) -> Parts:
    return allocate(config, make_plan(config).shards)


def text(start: int, length: int) -> str:
    """Documents of one start are prefixes of each other: near-duplicates where the lengths differ by little."""
    chosen = np.random.default_rng(start).choice(WORDS, 100)
    return " ".join([f"{start}", *chosen.tolist()][:length])


def keys(texts: Sequence[str]) -> set[int]:
    return {text_key(text) for text in texts}


def family(text: str) -> str:
    """Of a text of at least 90 words: all that begin so are near-duplicates; others may be missed by chance."""
    return text.casefold().split()[0]


documents = st.lists(
    st.builds(text, st.integers(0, 12), st.sampled_from([96, 97, 98, 99])), min_size=6, max_size=40, unique=True
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents, documents, st.integers(0, 9), st.data())
def test_no_document_nor_its_near_duplicate_is_in_both_parts(
    audit: Audit, tmp_path: Path, unseen: list[str], seen: list[str], seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, min(len(unseen), len(seen)) - 1))
    source = data.draw(st.sampled_from(["unseen", "seen", "mix"]))
    files = {
        "audit": write(tmp_path / "audit.jsonl", ["a b"]),
        "unseen": write(tmp_path / "unseen.jsonl", unseen),
        "seen": write(tmp_path / "seen.jsonl", [text.upper() for text in seen]),
    }
    fsd = {"train_on": source, "adapters": {"all": {"documents": count}, "some": {"share": 0.2}}}
    asked = [{"fsd": {"adapter": ["all", "some"]}}]
    config = audit(files, detectors=asked, fsd=fsd, seed=seed)
    try:
        found = parts(config)
    except UserError as error:  # nothing is left, or no family is small enough: said, not done
        reject = "to calibrate on" in str(error) or "must stay together" in str(error)
        assume(not reject)
        raise
    texts = [text for part in found.adapters.values() for text in part.documents]
    taken = {family(text) for text in texts}
    assert 0 < len(found.adapters["all"].documents) <= max(count, 2)
    assert found.adapters["some"].documents
    for role, own in (("unseen", unseen), ("seen", seen)):
        kept = {text for text in own if text_key(text) in set(found.calibration[role].tolist())}
        assert kept == {text for text in own if family(text) not in taken}
        assert kept
    again = parts(config)
    assert [part.documents for part in again.adapters.values()] == [part.documents for part in found.adapters.values()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return {
        "audit": write(tmp_path / "audit.jsonl", [text(100, 9)]),
        "unseen": write(tmp_path / "unseen.jsonl", [text(i, 12) for i in range(20)], ["a"] * 12 + ["b"] * 8),
    }


def test_another_adapter_or_a_larger_part_moves_no_document_and_another_seed_does(audit: Audit, files: Files) -> None:
    def chosen(seed: int = 0, **adapters: Any) -> dict[str, set[str]]:
        asked = [{"fsd": {"adapter": list(adapters)}}]
        found = parts(audit(files, detectors=asked, fsd={"adapters": adapters}, seed=seed))
        taken = {name: set(part.documents) for name, part in found.adapters.items()}
        assert found.calibration["unseen"].size == 20 - len(set().union(*taken.values()))
        return taken

    one = chosen(few={"documents": 5})["few"]
    two = chosen(few={"documents": 5}, many={"documents": 12, "method": "ia3"})
    assert one == two["few"] < two["many"]
    assert chosen(1, few={"documents": 5})["few"] != one
    groups = chosen(a={"group": "a", "documents": 3}, b={"group": "b", "share": 0.5})
    assert groups["a"] <= {text(i, 12) for i in range(12)}
    assert groups["b"] <= {text(i, 12) for i in range(12, 20)}
    assert (len(groups["a"]), len(groups["b"])) == (3, 4)


def test_documents_of_another_domain_take_near_duplicates_alone(audit: Audit, files: Files, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [f"so {text(i, 12)}" for i in range(19, 24)] + ["a", ""])
    found = parts(audit(files, fsd={"corpus": {"path": other}, "documents": 6}))
    part = found.adapters["default"]
    assert set(part.documents) == {f"so {text(i, 12)}" for i in range(19, 24)}  # one token teaches nothing
    assert part.training.batch_size == 5
    assert set(found.calibration["unseen"].tolist()) == keys([text(i, 12) for i in range(19)])
    assert np.unique(part.keys.text).size == 5


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"documents": 20}, "corpus.unseen has 20 documents, fine-tuning on 20 needs 21, so that at least one is left"),
        ({"group": "c"}, "no document of group 'c' in corpus.unseen; known: a, b"),
        ({"group": "b", "documents": 8}, "corpus.unseen has 8 documents of group 'b', fine-tuning on 8 needs 9"),
        ({"corpus": {"path": "none.jsonl"}}, "fsd.corpus: no file none.jsonl"),
        ({"adapters": {"unused": {"documnts": 3}}}, "fsd.adapters.unused: unknown key 'documnts'"),
        ({"adapters": {"x": {"documents": 3, "share": 0.2}}}, "fsd.adapters.x: documents and share exclude each other"),
        ({"train_on": "seen"}, "detector fsd fine-tunes on corpus.seen, which is not given"),
        ({"train_on": "mix"}, "detector fsd fine-tunes on corpus.seen, which is not given"),
        ({"method": "full"}, "fsd: method full trains all the weights and leaves no adapter: use lora, adalora or ia3"),
        ({"adapters": {"x": {"documnts": 3}}}, "fsd.adapters.x: unknown key 'documnts'; did you mean 'documents'?"),
        ({"adapters": {"x": {"share": 2}}}, "fsd.adapters.x: share: input should be less than 1, got 2"),
    ],
)
def test_what_cannot_be_split_is_one_line(audit: Audit, files: Files, settings: dict[str, Any], line: str) -> None:
    asked = [{"fsd": {"adapter": ["x"] if "x" in settings.get("adapters", {}) else "default"}}]
    assert line in user_error(lambda: parts(audit(files, detectors=asked, fsd=settings)))


def test_a_detector_that_cannot_be_asked_for_is_one_line(audit: Audit, files: Files) -> None:
    for detector, line in (
        ({"base": "gradient_norm"}, "detector fsd: base must be a likelihood detector such as loss or min_k"),
        ({"base": "min_kk"}, "detector fsd: base must be a detector: unknown detector 'min_kk'; did you mean 'min_k'?"),
        ({"base": "fsd"}, "detector fsd: base must be a likelihood detector"),
        ({"adapter": "few"}, "fsd.adapters: no adapter 'few'; did you mean 'fewer'? known: default, fewer"),
        ({"adapter": 3}, "detector fsd: adapter must be a name under fsd.adapters, got 3"),
    ):
        assert line in user_error(audit, files, detectors=[{"fsd": detector}], fsd={"adapters": {"fewer": {}}})


def test_scores_name_a_document_by_all_of_its_text_as_parts_do(audit: Audit, files: Files, tmp_path: Path) -> None:
    """Else what was trained on would not be known again, and would calibrate."""
    config = audit(files, detectors=["loss"], max_tokens=3)
    (shard,) = [shard for shard in make_plan(config).shards if shard.role == "unseen"]
    store = Store(str(tmp_path / "run"))
    (stage,) = plan_stages(config)
    receipt = process(stage, stage.make(stage, Placement()), shard, store)
    found = store.read_table(receipt.data, ["text_key", "truncated"])
    assert all(found["truncated"].to_pylist())
    assert set(found["text_key"].to_pylist()) == keys([text(i, 12) for i in range(20)])


def test_what_is_audited_is_not_trained_on_with_overlap_drop(audit: Audit, files: Files, tmp_path: Path) -> None:
    audited = [text(i, 12) for i in range(5)] + [f"so {text(5, 12)}"]  # of which 5 is a near-duplicate
    files["audit"] = write(tmp_path / "audit.jsonl", audited)
    other = write(tmp_path / "other.jsonl", [text(i, 12) for i in range(4, 8)])
    adapters = {"most": {"documents": 13}, "own": {"corpus": {"path": other}, "documents": 2}}
    asked = [{"fsd": {"adapter": list(adapters)}}]
    found = parts(audit(files, detectors=asked, fsd={"adapters": adapters}, overlap="drop"))
    assert len(found.adapters["most"].documents) == 13
    assert set(found.adapters["most"].documents) < {text(i, 12) for i in range(6, 20)}
    assert set(found.adapters["own"].documents) == {text(i, 12) for i in range(6, 8)}
    with pytest.raises(UserError, match=r"corpus\.unseen has 14 documents, fine-tuning on 14 needs 15"):
        parts(audit(files, fsd={"documents": 14}, overlap="drop"))


def test_a_group_without_a_column_is_one_line(audit: Audit, files: Files) -> None:
    described = audit(files, fsd={"group": "a"}).model_dump(mode="json")
    described["corpus"]["unseen"]["group"] = None
    with pytest.raises(UserError, match=r"fsd adapter default: group 'a' needs corpus\.unseen\.group, a column"):
        parts(build_config(described))


def test_the_plan_counts_what_is_fine_tuned_on(audit: Audit, files: Files) -> None:
    asks = [{"name": "a", "detectors": ["fsd"]}]
    config = audit(files, fsd={"documents": 11, "epochs": 2}, selections=asks)
    found = forecast(make_plan(config), {"dtype": "float32"})
    planned = {"name": "default", "method": "lora", "epochs": 2, "documents": 11, "train_on": ["unseen"]}
    assert found["adapters"] == [planned]
    assert "With 9 unseen documents to calibrate on" in found["selections"][0]["sentence"]
    assert [entry["adapter"] for entry in found["passes"]] == [None, "default"]
    pooled = {"fsd": {"documents": 3, "group": "a"}, "selections": asks}
    with pytest.raises(UserError, match=r"group 'a' alone out of calibration.* must be by_group, got pooled"):
        audit(files, **pooled)
    grouped = audit(files, **{**pooled, "selections": [{**asks[0], "calibration": "by_group"}]})
    assert "With at most 17 unseen" in forecast(make_plan(grouped), {"dtype": "float32"})["selections"][0]["sentence"]
    assert "needs 21" in user_error(forecast, make_plan(audit(files, fsd={"documents": 20})), {"dtype": "float32"})


def test_a_text_transform_changes_texts_keys_and_the_fingerprint(audit: Audit, files: Files, tmp_path: Path) -> None:
    files["unseen"] = write(tmp_path / "dated.jsonl", [f"{text(i, 6)} of 20{i:02d}" for i in range(10, 20)] + ["2015"])
    removed = audit(files, text_transform={"dates": "remove"}, fsd={"documents": 9})
    assert all(text.endswith(" of") for text in parts(removed).adapters["default"].documents)
    replaced = audit(files, text_transform={"dates": "replace_year", "year": 1999})
    assert all(text.endswith(" of 1999") or text == "1999" for text in parts(replaced).adapters["default"].documents)
    plain = audit(files)
    assert len({json.dumps(plan_stages(config)[-1].fingerprint) for config in (plain, removed, replaced)}) == 3
    with pytest.raises(UserError, match="year goes with dates: replace_year"):
        audit(files, text_transform={"dates": "remove", "year": 3000})
