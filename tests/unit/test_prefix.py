"""Documents behind known ones: recall, con_recall and codec, their prefixes, and that no shot calibrates."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from architectures import calls_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.small_model import WORDS
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import Document
from pipeline.corpus.keys import Keys
from pipeline.corpus.near_duplicates import NEAR_SHARE, NearDuplicateIndex
from pipeline.detectors.base import FORWARD, Evidence, Prefix, plan_passes
from pipeline.detectors.prefix import behind
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.models.load import LanguageModel, open_model
from pipeline.passes import shared
from pipeline.passes.forward import TokenStatistics, forward
from pipeline.passes.parts import PassSizes, behind_in_parts
from pipeline.plan.allocation import Parts, allocate, allocation_record
from pipeline.plan.description import load_config
from pipeline.plan.forecast import forecast
from pipeline.run.plan import describe_model, make_plan
from pipeline.stages import prefixes as prefixes_module
from pipeline.stages.prefixes import HELD, Prefixes, Shots, cut_to_room, prefix_cost, room_for
from pipeline.stages.registry import forward_passes
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.commands import ended, here, user_error
from tests.helpers.made_up import sentence, write_audit, write_corpus

LOG_PROB = frozenset({"log_prob"})


@pytest.fixture(scope="module")
def tiny(tiny_model_folder: Path) -> LanguageModel:
    return open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))


def test_scores_are_their_formulas() -> None:
    detectors = parse_detectors([{"recall": {"shots": 3}}, {"con_recall": {"shots": 3}}, "codec"])
    prefixes = Prefix("unseen", 3), Prefix("seen", 3), Prefix("unseen", 10, joined=False)
    rng, mask = np.random.default_rng(0), np.arange(9) < [[9], [5], [1]]
    drawn = -rng.random((4, 3, 9))
    found = dict(zip((FORWARD, *map(behind, prefixes)), drawn, strict=True))
    assert set(plan_passes(detectors)) == set(found)
    alone, unseen, seen, other = (drawn * mask).sum(2) / mask.sum(1)
    expected = [unseen / alone, (unseen - 0.5 * seen) / alone, alone - other]
    statistics = {one: TokenStatistics(torch.tensor(values), torch.tensor(mask)) for one, values in found.items()}
    for detector, values in zip(detectors, expected, strict=True):
        np.testing.assert_allclose(detector.score(Evidence([""] * 3, statistics)), values)


@pytest.mark.parametrize("size", [1, 7, 32])
@pytest.mark.parametrize("shares", [True, False])
def test_a_cached_prefix_gives_the_scores_of_concatenation_in_batches_of_any_size(
    tiny: LanguageModel, size: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared.shares_beginnings(tiny)
    if not shares:
        monkeypatch.setattr(shared, "_proven", {tiny.model: False})
    rng = np.random.default_rng(3)
    ids = [rng.integers(2, 200, size=rng.integers(2, 30)).tolist() for _ in range(32)]
    prefixes = [rng.integers(2, 200, size=n).tolist() for n in (1, 40)]
    places = rng.integers(2, size=32).tolist()
    for start in range(0, 32, size):
        some, at = ids[start : start + size], places[start : start + size]
        batch = behind_in_parts(tiny, prefixes, list(zip(at, some, strict=True)), 400, PassSizes())
        assert batch.mask.sum(1).tolist() == [len(one) - 1 for one in some]
        for row, (one, place) in enumerate(zip(some, at, strict=True)):
            whole = forward(tiny, [[*prefixes[place], *one]], LOG_PROB).log_prob[0, len(prefixes[place]) :]
            torch.testing.assert_close(batch.log_prob[row][batch.mask[row]], whole, atol=1e-4, rtol=0)


def test_a_prefix_is_read_once_for_all_batches_and_a_long_one_is_held_alone(tiny: LanguageModel) -> None:
    texts = [(0, [5, 6, 7, 8])] * 20
    assert shared.shares_beginnings(tiny)
    held = shared.HeldPrefixes()
    with calls_of(tiny.model.model) as calls:
        for _ in range(2):
            behind_in_parts(tiny, [list(range(2, 102))], texts, 1_040, PassSizes(), held)
    assert [call["input_ids"].numel() for call in calls] == [100, 40, 40, 40, 40]
    held, tail = shared.HeldPrefixes(), shared.find_tail(tiny.model)
    with torch.inference_mode():
        short = [held.cache(tiny, tail, range(start, start + 100)) for start in (2, 3, 4)]
        assert [held.cache(tiny, tail, range(start, start + 100)) for start in (2, 3, 4)] == short
        long = held.cache(tiny, tail, [5] * (shared.HELD - 100))
        assert held.cache(tiny, tail, [5] * (shared.HELD - 100)) is long
        assert held.cache(tiny, tail, range(2, 102)) is not short[0]


def test_a_prefix_keeps_its_end_as_far_as_it_fits_beside_the_longest_text() -> None:
    ids = list(range(3000))
    assert cut_to_room(ids, 1024, 2048) == ids[-1024:]
    assert cut_to_room(ids, 1500, 2048) == ids[-548:]
    assert cut_to_room(ids, 1024, None) == ids[-1024:]
    assert cut_to_room(ids[:50], 1998, 2048) == ids[:50]
    assert room_for(4096, 2048) == 0
    assert (room_for(24, 2048), room_for(24, None), room_for(24, 70)) == (64, 64, 46)
    assert cut_to_room(ids, 24, 2048) == ids[-64:]
    with pytest.raises(UserError, match=r"^a prefix of 3000 tokens does not fit: .* 2048 positions.* to at most 1984$"):
        cut_to_room(ids, 1985, 2048)
    for positions, remedy in ((66, "at most 2"), (65, "less, but the model is too small")):
        with pytest.raises(UserError, match=f"set max_tokens to {remedy}$"):
            cut_to_room(ids, 64, positions)


def test_one_of_several_is_chosen_by_seed_and_id_alone_and_is_no_near_duplicate() -> None:
    texts = [sentence(i, 60) for i in range(5)]
    pool = keys_of(texts)
    shots = Shots(tuple([i] for i in range(5)), pool.sketch, NEAR_SHARE)
    others = keys_of([sentence(100 + i, 60) for i in range(200)])
    ids = np.random.default_rng(0).integers(-(1 << 62), 1 << 62, size=200).tolist()
    chosen = shots.places(7, ids, others.sketch)
    assert set(chosen) == set(range(5))
    order = np.random.default_rng(1).permutation(200)
    assert shots.places(7, [ids[i] for i in order], others.sketch[order]) == [chosen[i] for i in order]
    assert shots.places(8, ids, others.sketch) != chosen
    themselves = shots.places(7, ids[:5] * 40, np.concatenate([pool.sketch] * 40))
    assert all(place != at % 5 for at, place in enumerate(themselves))
    copies = Shots(([1], [2]), pool.sketch[[0, 0]], NEAR_SHARE)
    assert copies.places(7, ids[:2], pool.sketch[:2])[0] is None

    def digest(ids: tuple[list[int], ...], near_copies: float, **changed: Any) -> dict[str, str]:
        shots = Shots(ids, changed.get("sketches", pool.sketch), near_copies)
        return Prefixes({Prefix("unseen", 5, joined=len(ids) == 1): shots}).fingerprint()

    several = tuple([i] for i in range(5))
    assert digest(several, 0.8) == digest(several, 0.8)
    assert list(map(len, digest(several, 0.8).values())) == [16]
    assert digest(several, 0.8) != digest(several, 0.9)
    assert digest(several, 0.8) != digest(several, 0.8, sketches=pool.sketch[::-1])
    assert digest(([1, 2],), 0.8) == digest(([1, 2],), 0.9)  # joined, all documents have the same before them
    assert digest(([1, 2],), 0.8) != digest(([2, 1],), 0.8)


@pytest.mark.recorded
def test_one_of_several_is_the_one_that_earlier_versions_chose() -> None:
    """Recorded: a run that goes on must choose what it chose when it began."""
    shots = Shots(tuple([i] for i in range(5)), keys_of([sentence(i, 60) for i in range(5)]).sketch, NEAR_SHARE)
    others = keys_of([sentence(100 + i, 60) for i in range(12)])
    ids = np.random.default_rng(0).integers(-(1 << 62), 1 << 62, size=200).tolist()
    assert shots.places(7, ids[:12], others.sketch) == [1, 2, 3, 0, 0, 1, 2, 0, 0, 0, 1, 0]


def keys_of(texts: list[str]) -> Keys:
    return Keys.of([Document(i, str(i), text, None) for i, text in enumerate(texts)])


def write(folder: Path, model: Path, detectors: list[Any], texts: dict[str, list[str]], **settings: Any) -> Path:
    rows = {role: [{"id": f"{role}{i}", "text": t} for i, t in enumerate(some)] for role, some in texts.items()}
    columns = [detector.column for detector in parse_detectors(detectors)]
    given = {
        "model": {"path": str(model), "dtype": "float32"},
        "corpus": write_corpus(folder, rows),
        "detectors": detectors,
        "selections": [{"name": "members", "detectors": columns[:1], "procedure": "bh", "alpha": 0.2}],
        **settings,
        "resources": {"shard_bytes": 1 << 20, **settings.get("resources", {})},
    }
    return write_audit(folder, model, **given)


def allocated(path: Path) -> Parts:
    config = load_config(str(path))
    return allocate(config, make_plan(config).shards)


ALL = [{"recall": {"shots": 4}}, {"con_recall": {"shots": 3}}, {"codec": {"shots": 5}}]


@given(seed=st.integers(0, 1000), copies=st.integers(1, 4), shots=st.integers(1, 9))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_shot_and_no_near_duplicate_of_one_calibrates(
    seed: int, copies: int, shots: int, tmp_path: Path, tiny_model_folder: Path
) -> None:
    families = [sentence(seed * 100 + i // copies, 60) + f" {WORDS[i % copies]}" for i in range(24)]
    detectors = [{"recall": {"shots": shots}}, {"codec": {"shots": shots}}, {"con_recall": {"shots": 4}}]
    roles = {"audit": [sentence(9)], "unseen": families, "seen": [sentence(5000 + i, 60) for i in range(8)]}
    config = load_config(str(write(tmp_path, tiny_model_folder, detectors, roles, seed=seed)))
    shards = make_plan(config).shards
    if shots < copies:
        assert "must stay together" in user_error(allocate, config, shards)
        return
    parts = allocate(config, shards)
    record = allocation_record(parts, {})
    assert set(record.shots) == {f"{shots} of unseen", f"one of {shots} of unseen", "4 of unseen", "4 of seen"}
    for prefix, (_, keys) in parts.shots.items():
        assert 0 < len(keys) <= prefix.shots
        assert not set(keys.text.tolist()) & set(parts.calibration[prefix.role].tolist())
        assert not set(record.shots[str(prefix)]) & set(record.calibration[prefix.role])
        if prefix.role == "unseen":  # whole families
            near = NearDuplicateIndex.of(keys.sketch, NEAR_SHARE).matches(keys_of(families).sketch)
            assert near.sum() == len(keys)
    again = allocate(config, shards).prefixes()
    assert again.fingerprint() == parts.prefixes().fingerprint()  # type: ignore[union-attr]


def of_all_roles(count: int, words: int) -> dict[str, list[str]]:
    roles = enumerate(("audit", "unseen", "seen"))
    return {role: [sentence(1000 * n + i, words) for i in range(count)] for n, role in roles}


def test_what_cannot_be_shown_is_refused_in_one_line(tmp_path: Path, tiny_model_folder: Path) -> None:
    texts = of_all_roles(12, 60)
    unseen = {role: texts[role] for role in ("audit", "unseen")}
    own = {"corpus": {"path": str(tmp_path / "unseen.jsonl")}, "documents": 12}
    refused: list[tuple[list[Any], dict[str, list[str]], dict[str, Any], str]] = [
        (["con_recall"], unseen, {}, "con_recall reads each text after.*seen"),
        ([{"recall": {"shots": 12}}], texts, {}, "unseen has 12 documents, 12 shots need 13.*at most 11"),
        ([{"codec": {"shots": 20}}], texts, {}, "unseen has 12 documents, 20 shots need 21"),
        ([{"recall": {"shots": 9}}], texts, {"max_tokens": 2040}, "does not fit.*2048.*at most 1984"),
        (
            [{"recall": {"shots": 3}}, "fsd"],
            unseen,
            {"fsd": own},
            r"^fsd adapter default and prefix of 3 of unseen leave none of",
        ),
    ]
    for detectors, roles, changed, message in refused:
        assert re.search(
            message, user_error(allocated, write(tmp_path, tiny_model_folder, detectors, roles, **changed))
        )
    for detector, argument in (({"recall": {"shots": 0}}, "shots"), ({"con_recall": {"gamma": 2}}, "gamma")):
        assert argument in user_error(parse_detectors, [detector])


def run(path: Path) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    assert ended("run", str(path)) == 0
    store = Store(yaml.safe_load(path.read_text())["run"])
    rows = [row for r in read_receipts(store, "score") for row in store.read_table(r.data).to_pylist()]
    return {row["doc_id"]: row for row in rows}, json.loads(Path(store.path("manifest.json")).read_text())


def test_a_run_scores_alike_in_any_shards_and_calibrates_without_shots(tmp_path: Path, tiny_model_folder: Path) -> None:
    texts = {
        role: [text[: 60 + 9 * (i % 9)] for i, text in enumerate(some)] for role, some in of_all_roles(30, 20).items()
    }
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, manifest = run(write(tmp_path / "whole", tiny_model_folder, ALL, texts))
    resources = {"cluster": "local", "actors": 2, "shard_documents": 7, "batch_tokens": 100}
    cut, _ = run(write(tmp_path / "cut", tiny_model_folder, ALL, texts, resources=resources))
    assert set(whole) == set(cut)
    for column in (detector.column for detector in parse_detectors(ALL)):
        values = np.array([[rows[name][column] for name in whole] for rows in (whole, cut)])
        np.testing.assert_allclose(values[0], values[1], atol=1e-4, rtol=0)
    shots = {key: len(value) for key, value in manifest["shots"].items()}
    assert shots == {"4 of unseen": 4, "3 of unseen": 3, "3 of seen": 3, "one of 5 of unseen": 5}
    assert len(manifest["calibration"]["unseen"]) == 25  # smaller parts lie in larger ones
    assert len(manifest["calibration"]["seen"]) == 27
    summary = json.loads((tmp_path / "whole/run/selection/members/summary.json").read_text())
    stated = summary["diagnostics"]["fine_tuned"]["sentence"]
    assert stated.startswith("5 unseen documents do not calibrate: they were fine-tuned on or are in a prefix")
    assert summary["n_calibration"] == 25


def test_the_plan_names_prefixes_and_counts_those_that_are_read_for_each_batch(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resources = {"cluster": "local", "actors": 1, "batch_tokens": 256}
    path = write(tmp_path, tiny_model_folder, ALL, of_all_roles(64, 20), resources=resources)
    config = load_config(str(path))
    plan, model = make_plan(config), describe_model(config.model)
    costs = {
        entry["prefix"]: entry["prefix_cost"] for entry in forecast(plan, model)["passes"] if "prefix_cost" in entry
    }
    assert costs == dict.fromkeys(("4 of unseen", "3 of unseen", "3 of seen", "one of 5 of unseen"), 0)
    single, batch = Prefix("unseen", 4, joined=False), 1_000
    once = {"prefix_tokens": HELD // 4, "prefix_cost": 0.0}
    assert prefix_cost(single, HELD // 4, 50.0, batch, HELD) == once
    longer = prefix_cost(single, HELD // 4 + 1, 50.0, batch, HELD)
    assert longer["prefix_cost"] == 4 * (HELD // 4 + 1) / batch
    assert [prefix_cost(Prefix("unseen", 4), 10, 50.0, batch, room)["prefix_tokens"] for room in (99, 30)] == [40, 30]
    many = Prefix("unseen", 1000, joined=False)
    costs = [prefix_cost(many, HELD, length, 100, HELD)["prefix_cost"] for length in (0, 1, 2)]
    assert costs == [HELD, HELD, HELD / 2], "a batch holds at most as many documents as tokens"
    assert prefix_cost(single, HELD, 500.0, batch, HELD)["prefix_cost"] == 2 * HELD / batch, "two documents a batch"
    for module in (prefixes_module, shared):
        monkeypatch.setattr(module, "HELD", 50)
    facts = forecast(plan, model)
    passes = [entry for entry in facts["passes"] if "prefix_cost" in entry]
    assert [entry["prefix"] for entry in passes if entry["prefix_cost"]] == ["one of 5 of unseen"]
    assert [forward_passes(entry) for entry in passes] == [1 + entry["prefix_cost"] for entry in passes]
    continued = {"kind": "generate", "prefix_ratio": 0.25, "draws": 4}
    paraphrased = [{"kind": kind, "paraphrases": draws} for kind in ("forward", "gradient") for draws in (0, 2)]
    assert list(map(forward_passes, paraphrased)) == [1, 3, 3, 9]
    assert forward_passes(continued) == 0.25 + 4 * 0.75, "the prefix once, and the rest once a draw"
    shown = " ".join(here(capsys, "plan", path)[0].split())
    assert re.search(r"pass forward: target model, plain text after 4 of unseen \(\d+ tokens\)", shown)
