"""An endpoint's answers, written down as they come, so that none is paid twice; and what they cost in all."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.endpoint.client import Usage
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, intact_receipts, is_sealed, json_digest, receipt_name, sealed


class Answers:
    """The answers to one shard's documents that no receipt names yet: a line of JSON each."""

    def __init__(self, store: Store, folder: str, stage: str, shard: str, made_of: Mapping[str, Any]) -> None:
        """Open what is there.

        Args:
            store: the run directory.
            folder: where the stage's files are.
            stage: of the receipts.
            shard: id of the shard whose answers they are.
            made_of: all that could change an answer; those that were made of anything else are passed over.
        """
        self.store = store
        self.name = f"{folder}/{shard}.jsonl"
        self.stage = stage
        self.made_of = json_digest(made_of)[:16]
        self.spent = Usage()
        self._session, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._lines = list(_lines(store, self.name))
        for line in _costs(self._lines):
            if line["stage"] == stage or not store.exists(receipt_name(line["stage"], shard)):
                self.spent += Usage(line["requests"], line["tokens"])
        if store.read_grown(self.name):
            store.append(self.name, b"\n")  # a driver that was killed may have left half a line

    def before(self) -> Iterator[dict[str, Any]]:
        """The answers of earlier calls, in order."""
        return (line for line in self._lines if line["made_of"] == self.made_of and "row" in line)

    def ask(self) -> Question:
        """A question that is to be asked."""
        return Question(self, f"{self._session}-{next(self._numbers)}")

    def add(self, spent: Usage, **answer: Any) -> None:
        """Write down an answer, or without one what was spent for nothing."""
        if not answer and not spent.requests:
            return
        self.spent += spent
        self.write(spent, **answer)

    def write(self, cost: Usage, **values: Any) -> None:
        """Append a line."""
        line = sealed({"stage": self.stage, "made_of": self.made_of, **values, **cost.to_dict()})
        self.store.append(self.name, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """A receipt names all of it now."""
        self.store.remove_grown(self.name)


@dataclass(frozen=True, slots=True)
class Question:
    """A question to an endpoint: the most that it can cost is written down before it is sent, its cost after it.

    Of a driver that was killed in between, the request that was under way counts with the most that it can cost.
    """

    answers: Answers
    key: str  # of no other question
    spent: Usage = field(default_factory=Usage)  # by its requests that have ended

    def book(self, most: Usage) -> None:
        """Note that a request is about to be sent; what those before it cost is known."""
        cost = Usage(self.spent.requests + most.requests, self.spent.tokens + most.tokens)
        self.answers.write(cost, begun=self.key)

    def finish(self, **answer: Any) -> None:
        """Note the answer, if there is one, and what all requests cost."""
        if self.spent.requests:
            self.answers.add(self.spent, settles=self.key, **answer)


def spent_before(store: Store, stage: str, folders: Mapping[str, str]) -> Usage:
    """What a run spent so far on the endpoint of a stage, by receipts and by answers that no receipt names yet.

    Args:
        store: the run directory.
        stage: name of a stage that asks the endpoint; the audited model's and the reference model's are distinguished.
        folders: kinds of stages that ask endpoints -> where their answers lie.
    """
    reference = _of_reference(stage.split("/")[1])
    total = Usage()
    for name in _stages(store, folders):
        for receipt in intact_receipts(store, name) if _of_reference(name.split("/")[1]) == reference else ():
            total += _spent_for(receipt)
    for folder in folders.values():
        for part in store.names(folder):
            if _of_reference(part) != reference:
                continue
            shards = {name.split(".")[0] for name in store.names(f"{folder}/{part}", ".jsonl")}
            for shard in sorted(shards):
                for line in _costs(list(_lines(store, f"{folder}/{part}/{shard}.jsonl"))):
                    if not store.exists(receipt_name(line["stage"], shard)):
                        total += Usage(line["requests"], line["tokens"])
    return total


def _stages(store: Store, kinds: Iterable[str]) -> Iterator[str]:
    """The stages of these kinds of which there are receipts, one or two folders below that of the kind."""
    for kind in kinds:
        for part in store.names(f"receipts/{kind}"):
            names = store.names(f"receipts/{kind}/{part}")
            if any(name.endswith(".json") for name in names):
                yield f"{kind}/{part}"
            yield from (f"{kind}/{part}/{name}" for name in names if not name.endswith(".json"))


def _of_reference(part: str) -> bool:
    return part.startswith("reference-")


def _spent_for(receipt: Receipt) -> Usage:
    return Usage(**receipt.spent) if receipt.spent is not None else Usage()


def _costs(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines that count: of a question that has no final answer the last of those before its requests, else none."""
    final = {line["settles"] for line in lines if "settles" in line}
    last = {line["begun"]: place for place, line in enumerate(lines) if "begun" in line}
    return (
        line
        for place, line in enumerate(lines)
        if "begun" not in line or (line["begun"] not in final and last[line["begun"]] == place)
    )


def _lines(store: Store, name: str) -> Iterator[dict[str, Any]]:
    for line in store.read_grown(name).split(b"\n"):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # half a line, of a driver that was killed
                continue
            if isinstance(value, dict) and is_sealed(value):  # else it is not as it was written
                yield value
