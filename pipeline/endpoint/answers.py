"""An endpoint's answers, recorded as they arrive, so that none is paid twice; and their total cost."""

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
    """The answers for one shard's documents without a receipt, one line of JSON each."""

    def __init__(self, store: Store, folder: str, stage: str, shard: str, made_of: Mapping[str, Any]) -> None:
        """Open the recorded answers.

        Args:
            store: run directory.
            folder: folder of the stage's files.
            stage: stage of the receipts.
            shard: id of the shard.
            made_of: everything that affects an answer; answers with other values are skipped.
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
        """Create a request to the endpoint."""
        return Question(self, f"{self._session}-{next(self._numbers)}")

    def add(self, spent: Usage, **answer: Any) -> None:
        """Record an answer and its cost, or only the cost if there is no answer."""
        if not answer and not spent.requests:
            return
        self.spent += spent
        self.write(spent, **answer)

    def write(self, cost: Usage, **values: Any) -> None:
        """Append a line."""
        line = sealed({"stage": self.stage, "made_of": self.made_of, **values, **cost.to_dict()})
        self.store.append(self.name, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Remove the recorded answers: a receipt contains them."""
        self.store.remove_grown(self.name)


@dataclass(frozen=True, slots=True)
class Question:
    """One request to an endpoint: its maximum cost is recorded before it is sent, its cost afterwards.

    If the driver is killed in between, the request counts with its maximum cost.
    """

    answers: Answers
    key: str  # unique
    spent: Usage = field(default_factory=Usage)  # by its completed attempts

    def book(self, most: Usage) -> None:
        """Record that an attempt is about to be sent; the cost of earlier ones is known."""
        cost = Usage(self.spent.requests + most.requests, self.spent.tokens + most.tokens)
        self.answers.write(cost, begun=self.key)

    def finish(self, **answer: Any) -> None:
        """Record the answer, if any, and the cost of all attempts."""
        if self.spent.requests:
            self.answers.add(self.spent, settles=self.key, **answer)


def stored_answers(store: Store, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The answers in a folder for which there is no receipt yet, each with the id of its shard, in order."""
    for shard in sorted({name.split(".")[0] for name in store.names(folder, ".jsonl")}):
        for line in _lines(store, f"{folder}/{shard}.jsonl"):
            if "row" in line:
                yield shard, line


def spent_before(store: Store, stage: str, folders: Mapping[str, str]) -> Usage:
    """Usage of the endpoint of a stage by a run so far, from receipts and from answers without a receipt.

    Args:
        store: the run directory.
        stage: stage that uses the endpoint; stages of the audited and of the reference model are distinguished.
        folders: kind of stage that uses endpoints -> folder of its answers.
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
    """The stages of these kinds that have receipts, one or two folders below the folder of the kind."""
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
    """The lines of the costs: for a request without a final line, its last recorded maximum cost."""
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
            except (ValueError, RecursionError):  # incomplete line of a killed driver
                continue
            if isinstance(value, dict) and is_sealed(value):  # else it was damaged
                yield value
