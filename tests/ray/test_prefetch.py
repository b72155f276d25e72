"""An actor too reads the next shard of a bundle while it computes one; what is prefetched can kill it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import recorder
from ray import cloudpickle
from recorder import Recorder, letters, shards_of, stage_of

from pipeline.config.audit import ResourcesConfig
from pipeline.corpus.shard import Shard
from pipeline.stages.base import Stage, model_digests
from pipeline.stages.events import Failure
from pipeline.stages.local import finish_shards
from pipeline.stages.process import read_rows
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.actors import map_shards


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stage of these tests goes to actors as it is, they cannot import it; all shards are in one bundle."""
    monkeypatch.setattr("ray_jobs.actors.BUNDLES_AN_ACTOR", 0.5)
    cloudpickle.register_pickle_by_value(recorder)
    yield
    cloudpickle.unregister_pickle_by_value(recorder)


def in_an_actor(stage: Stage, shards: list[Shard], store: Store) -> list[tuple[str, str, str]]:
    """Let one actor at a time finish shards; what was noted, as (process, event, text)."""
    resources = ResourcesConfig(cluster="ray", actors=1, gpus_per_actor=0)
    stage = replace(stage, make=Recorder, digest=model_digests())
    events = list(map_shards(stage, resources, shards, store, "some driver"))
    assert not [event for event in events if isinstance(event, Failure)]
    assert {event.shard for event in events if isinstance(event, Receipt)} == {shard.id for shard in shards}
    return [tuple(line.split("\t")) for line in Path(stage.settings.notes).read_text().splitlines()]


def lengths(stage: Stage, shards: list[Shard], store: Store) -> list[dict[int, int | None]]:
    """What the rows of each shard say."""
    tables = [read_rows(stage, shard, store) for shard in shards]
    return [{row: values["length"] for row, values in table.items()} for table in tables]


@pytest.mark.usefixtures("cluster")
def test_an_actor_reads_the_next_shard_while_it_works_on_this_one(tmp_path: Path) -> None:
    texts = [letters(letter, 4) for letter in "abcdef"]
    shards, store = shards_of(tmp_path / "actor", *texts)
    stage = stage_of(together=len(texts), notes=str(tmp_path / "notes"))
    notes = [(event, text) for _, event, text in in_an_actor(stage, shards, store)]

    order = list(dict.fromkeys(text[0] for event, text in notes if event == "prepare"))
    assert sorted(order) == list("abcdef")
    for this, following in itertools.pairwise(order):
        ends = [at for at, (event, text) in enumerate(notes) if event == "work ended" and text[0] == this]
        begins = [at for at, (event, text) in enumerate(notes) if event == "prepare" and text[0] == following]
        assert begins[0] < ends[0], f"{following} is read while {this} is worked on"
    for kind in ("prepare", "work"):
        inside = [event for event, _ in notes if event.startswith(kind)]
        assert inside == [kind, f"{kind} ended"] * (len(inside) // 2), "one at a time"
    worked = [text[0] for event, text in notes if event == "work"]
    assert worked == sorted(worked, key=order.index), "a shard is worked on as a whole, in the order of reading"

    others, here = shards_of(tmp_path / "here", *texts)
    alone = stage_of()
    list(finish_shards(alone, others, here, workers=1))
    assert lengths(stage, shards, store) == lengths(alone, others, here)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_document_that_kills_an_actor_while_it_is_prefetched_is_found_and_no_other(tmp_path: Path) -> None:
    texts = [*(letters(letter, 4) for letter in "abc"), ["d", "dd", "d deadly to tokenise", "dddd"], letters("e", 4)]
    shards, store = shards_of(tmp_path / "killed", *texts)
    stage = stage_of(together=5, deadly_at=str(tmp_path / "flag"), notes=str(tmp_path / "notes"))
    notes = in_an_actor(stage, shards, store)

    first = [note[1:] for note in notes if note[0] == notes[0][0]]
    began, ended = (sum(event == kind for event, _ in first) for kind in ("work", "work ended"))
    assert ("prepare", "d") in first
    assert began - ended == 1, "its actor was killed by what was prefetched, in the midst of another shard"
    assert len({process for process, _, _ in notes}) <= 7
    problems = [
        (number, row, values["problem"])
        for number, shard in enumerate(shards)
        for row, values in read_rows(stage, shard, store).items()
        if values["problem"]
    ]
    assert [problem[:2] for problem in problems] == [(3, 2)]
    assert "being worked on when its worker was killed" in problems[0][2]
    assert not store.names("attempts/turns", ".json")

    texts[3][2] = "d wrong to tokenise"
    others, clean = shards_of(tmp_path / "clean", *texts)
    alone = stage_of()
    list(finish_shards(alone, others, clean, workers=1))
    assert lengths(stage, shards, store) == lengths(alone, others, clean)
