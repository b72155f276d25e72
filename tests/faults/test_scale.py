"""A million documents and 200,000 shards: what the driver holds is bounded, and the answer is the same to the byte."""

import json
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.answers.selected import ORDER, STRENGTH, write_selected
from pipeline.corpus.known_texts import repeated_ids
from pipeline.corpus.near_duplicates import BLOCK, SKETCH, SketchFile, different, near_families, sketch, stack_sketches
from pipeline.corpus.shard import BY_ID, Shard, shard_index
from pipeline.errors import UserError
from pipeline.plan.description import load_config
from pipeline.run.manifest import read_shards, reconciled_shards, write_shards
from pipeline.run.plan import make_plan
from pipeline.run.records import SHARDS_FILE
from pipeline.stages.events import Failure
from pipeline.stages.registry import plan_stages
from pipeline.store.external_sort import ROWS, SortedRows
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.actors import bundles, map_shards, packed, shards_in
from tests.helpers.clusters import output_of
from tests.helpers.made_up import sentence

MANY = 200_000
SHARD = Shard("audit-0", "audit", "a.jsonl", "/a.jsonl", "jsonl", 0, 9, 0, None, "c", "text", None, None)

SORTING = """
import resource, pyarrow as pa
from pipeline.store.external_sort import SortedRows, write_pieces
from pipeline.store.files import Store
rows = SortedRows(pa.schema([("p", pa.float64()), ("row", pa.int64()), ("text", pa.string())]), ["p", "row"])
def part(number):
    count = 5_000
    places = range(number * count, (number + 1) * count)
    values = [[place * 7919 % 1009 / 1009 for place in places], list(places), [str(place) * 60 for place in places]]
    return pa.table(values, schema=rows.schema)
peaks = []
for some in (range(4), range(4, PARTS)):
    for number in some:
        rows.add(part(number))
    write_pieces(Store(FOLDER), "rows.parquet", rows.schema, rows.pieces())
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(peaks[1] - peaks[0], len(rows))
"""


def selected_rows(count: int, seed: int) -> pa.Table:
    """Rows as a selection gives them, few p-values among many."""
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "doc_id": [f"d{row}" for row in range(count)],
            "p_value": rng.integers(1, 40, count) / 40,
            "source": [f"{file}.jsonl" for file in rng.integers(0, 30, count)],
            "row": rng.permutation(count),
            "_fused": rng.integers(0, 2, count).astype(float),
            "_score": rng.integers(-3, 3, count).astype(float),
        }
    )


@pytest.mark.parametrize("count", [0, 1, ROWS, 3 * ROWS + 17])
def test_selected_documents_are_written_in_pieces_to_the_bytes_of_one_sorted_table(count: int, tmp_path: Path) -> None:
    whole, store = selected_rows(count, seed=1), Store(str(tmp_path))
    rows = SortedRows(whole.schema, ORDER)
    for start in range(0, count, 7_001):
        rows.add(whole.slice(start, 7_001))
    write_selected(store, "selection/s", rows, clean=True)
    ordered = whole.sort_by([(key, "ascending") for key in ORDER]).drop_columns(STRENGTH)
    pq.write_table(
        ordered, tmp_path / "whole.parquet", compression="zstd", row_group_size=ROWS, write_page_checksum=True
    )
    written = (tmp_path / "selection/s/selected.parquet").read_bytes()
    assert written == (tmp_path / "whole.parquet").read_bytes()
    assert written == (tmp_path / "selection/s/clean.parquet").read_bytes()
    tasks: dict[str, list[int]] = {}
    for source, row in zip(ordered["source"].to_pylist(), ordered["row"].to_pylist(), strict=True):
        tasks.setdefault(source.removesuffix(".jsonl"), []).append(row)
    store.write_json("whole.json", {task: sorted(tasks[task]) for task in sorted(tasks)})
    assert store.read("selection/s/clean_ids.json") == store.read("whole.json")
    assert not list(tmp_path.rglob(".*")), "no part of a file is left"


@pytest.mark.slow
def test_the_memory_of_sorting_does_not_grow_with_the_selected(tmp_path: Path) -> None:
    code = f"PARTS = 80; FOLDER = {str(tmp_path)!r}\n{SORTING}"
    growth, count = map(int, output_of(code, seconds=300).split())
    assert count == 400_000
    assert growth < 100, "MB; the rows are 150 MB, and a sorted table of them twice that"


def test_tables_of_the_command_stand_in_memory_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    code = (
        "from ray_jobs.cli import main\ntry:\n    main(['--version'])\nexcept SystemExit:\n    pass\n"
        "import pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    )
    assert output_of(code).split()[-1] == "system"


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that Python and numpy held at most during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, 5 * BLOCK + 7])
@pytest.mark.parametrize("most", [2, 1_000, 1 << 62])
def test_equal_values_are_numbered_in_the_order_of_their_first_in_little_memory(size: int, most: int) -> None:
    values = np.random.default_rng(size).integers(0, most, size).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    first, number = different(values)
    places: dict[int, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values.tolist()]
    assert number.tolist() == numbers
    assert values[first].tolist() == list(places)
    assert (np.diff(first) > 0).all()
    if most > size > BLOCK:
        assert peak_of(partial(different, values)) < 48 * size


def test_the_families_of_sketches_in_a_file_are_those_of_sketches_in_memory() -> None:
    texts = [sentence(seed % 400) + (" and so on" if seed % 3 else "") for seed in range(1_200)]
    sketches = stack_sketches(list(map(sketch, texts)))
    file, places = SketchFile(), np.random.default_rng(0).permutation(len(sketches))
    for start in range(0, len(sketches), 100):
        file.append(sketches[places][start : start + 100])
    file.places = np.argsort(places)
    assert np.array_equal(file[np.arange(len(sketches))], sketches)
    assert np.array_equal(near_families(file, 0.7), near_families(sketches, 0.7))
    assert near_families(SketchFile()).size == 0


def test_a_few_sketches_of_a_large_file_are_read_alone() -> None:
    sketches = np.random.default_rng(1).integers(0, 256, (30_000, SKETCH), dtype=np.uint8)
    file = SketchFile()
    file.append(sketches)
    places = np.array([29_999, 3, 3, *range(9_000, 9_200), 17_000])
    assert np.array_equal(file.read(places), sketches[places])


def test_repeated_ids_are_the_same_in_any_order_and_however_few_fit_into_memory() -> None:
    rng = np.random.default_rng(2)
    shards = [rng.integers(-3_000, 3_000, 700) for _ in range(9)]
    seen, expected = set(), []
    for number, keys in enumerate(shards):
        for position, key in enumerate(keys.tolist()):
            if key in seen:
                expected.append((number, position))
            seen.add(key)
    for at_once in (300, 10**6):
        repeats = repeated_ids(reversed(list(enumerate(shards))), 6_300, at_once)
        assert [(number, int(p)) for number in sorted(repeats) for p in repeats[number]] == expected


def test_bundles_hold_all_shards_in_their_order_and_about_as_much_work_each() -> None:
    shards = [replace(SHARD, id=f"audit-{number:06d}") for number in range(100)]
    sizes = {shard.id: float(max(1, 30 - number)) for number, shard in enumerate(shards)}
    made = bundles(shards, sizes, 40.0)
    assert [shard for bundle in made for shard in bundle] == shards
    assert [len(bundle) for bundle in made[:3]] == [1, 1, 1], "two of the longest are too much together"
    totals = [sum(sizes[shard.id] for shard in bundle) for bundle in made]
    assert max(totals) <= 40
    assert all(total + sizes[after[0].id] > 40 for total, after in zip(totals, made[1:], strict=False))
    assert bundles(shards[:2], sizes, 0.5) == [[shards[0]], [shards[1]]], "a shard is never divided"


def test_a_bundle_holds_its_shards_in_few_bytes() -> None:
    shards = [replace(SHARD, id=f"audit-{number:06d}", start=number, stop=number + 1) for number in range(64)]
    assert shards_in(packed(shards)) == shards
    assert len(packed(shards)) < 2_000


def test_a_reconciled_table_of_shards_is_not_held_twice(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    shards = [replace(SHARD, id=f"audit-{number:06d}", start=number, stop=number + 1) for number in range(50)]
    assert reconciled_shards(store, shards) is None
    write_shards(store, shards)
    reconciled = reconciled_shards(store, shards)
    assert reconciled is not None
    assert all(one is other for one, other in zip(reconciled, shards, strict=True))
    assert json.loads(store.read(SHARDS_FILE)) == [{**shard.to_dict(), "files": []} for shard in shards]
    planned = [replace(shard, first_row=0) for shard in shards]
    write_shards(store, [replace(shard, first_row=shard.start) for shard in shards])
    numbered = reconciled_shards(store, planned)
    assert numbered is not None
    assert [shard.first_row for shard in numbered] == [shard.start for shard in shards]
    assert all(one.id is other.id and one.stop is other.stop for one, other in zip(numbered, planned, strict=True))
    write_shards(store, shards)
    assert reconciled_shards(store, shards[:-1]) is None
    assert reconciled_shards(store, [*shards, SHARD]) is None
    filed = read_shards(store)
    assert filed == shards
    assert filed[0].path is filed[1].path, "what shards share is held once"


def test_a_shard_is_found_by_its_id_among_shards_in_any_order() -> None:
    shards = [replace(SHARD, id=f"{role}-{number:06d}") for role in ("unseen", "audit") for number in (2, 1_000_000, 7)]
    ordered = sorted(shards, key=BY_ID)
    places = [shard_index(shard.id, ordered) for shard in shards]
    assert [ordered[place] for place in places if place is not None] == shards
    assert [shard_index(name, ordered) for name in ("", "audit-000003", "unseen-1000001")] == [None] * 3
    assert shard_index("audit-000000", []) is None


def test_a_table_of_shards_that_was_cut_off_is_one_line(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_shards(store, [SHARD, SHARD])
    whole = store.read(SHARDS_FILE)
    for end in (len(whole) - 3, len(whole) // 2, 2, 0):
        store.write(SHARDS_FILE, whole[:end])
        with pytest.raises(UserError, match=r"shards\.json is damaged: "):
            read_shards(store)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_200_000_shards_start_on_a_cluster_like_200(make_audit: Callable[..., Any], tmp_path: Path) -> None:
    config = load_config(str(make_audit(audit=[sentence(1)], resources={"cluster": "ray", "actors": 2})))
    shard = next(shard for shard in make_plan(config).shards if shard.role == "audit")
    (stage,) = plan_stages(config)
    driver = psutil.Process()

    def start(count: int) -> tuple[float, float]:
        """Seconds of the driver's own work to the first receipt, and MB that it grew by."""
        before, began = driver.memory_info().rss, time.process_time()
        shards = [replace(shard, id=f"audit-{number:06d}") for number in range(count)]
        outcomes: Counter[type] = Counter()
        for event in map_shards(stage, config.resources, shards, Store(str(tmp_path / str(count))), "driver"):
            outcomes[type(event)] += 1
            if outcomes[Receipt]:
                break
        assert not outcomes[Failure]
        return time.process_time() - began, (driver.memory_info().rss - before) / 2**20

    few, _ = start(200)
    seconds, growth = start(MANY)
    assert seconds - few < 10
    assert growth < 200
