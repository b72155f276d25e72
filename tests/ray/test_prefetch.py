"""An actor too reads the next shard of a bundle while it computes one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray import cloudpickle

from pipeline.config.audit import ResourcesConfig
from pipeline.models.unchanged import ModelDigests
from pipeline.stages.events import Failure
from pipeline.store.receipts import Receipt
from ray_jobs.actors import map_shards
from tests.helpers import recorder
from tests.helpers.recorder import Recorder, letters, shards_of, stage_of


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stage of these tests goes to actors as it is, they cannot import it; all shards are in one bundle."""
    monkeypatch.setattr("ray_jobs.actors.BUNDLES_AN_ACTOR", 0.5)
    cloudpickle.register_pickle_by_value(recorder)
    yield
    cloudpickle.unregister_pickle_by_value(recorder)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_actor_reads_the_next_shard_while_it_works_on_this_one(tmp_path: Path) -> None:
    texts = [letters(letter, 4) for letter in "abcdef"]
    shards, store = shards_of(tmp_path / "actor", *texts)
    stage = stage_of(together=len(texts), notes=str(tmp_path / "notes"))
    stage = replace(stage, make=Recorder, digest=ModelDigests())
    resources = ResourcesConfig(cluster="ray", actors=1, gpus_per_actor=0)
    events = list(map_shards(stage, resources, shards, store, "some driver"))
    assert not [event for event in events if isinstance(event, Failure)]
    assert {event.shard for event in events if isinstance(event, Receipt)} == {shard.id for shard in shards}
    notes = [line.split("\t")[1:] for line in (tmp_path / "notes").read_text().splitlines()]

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
