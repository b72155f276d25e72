"""Receipts: the durable proof that one stage finished one shard, written once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeline.errors import UserError
from pipeline.store.files import Store


@dataclass(frozen=True, slots=True)
class Receipt:
    """The durable proof that one stage finished one shard: n_in == n_scored + n_quarantined."""

    shard: str
    role: str
    n_in: int
    n_scored: int
    n_quarantined: int
    data: str
    quarantine: str | None
    reasons: dict[str, int]
    fingerprint: dict[str, Any]
    tokens: int = 0
    n_truncated: int = 0
    seconds: float = 0.0
    gradient: dict[str, Any] | None = None  # over what the gradient norm was taken and how, if it was
    spent: dict[str, int] | None = None  # requests and tokens, where an endpoint was asked

    def __post_init__(self) -> None:
        """Refuse a receipt that loses a document."""
        if self.n_in != self.n_scored + self.n_quarantined:
            raise ValueError(
                f"shard {self.shard}: {self.n_in} in, {self.n_scored} scored, {self.n_quarantined} quarantined"
            )


_KEYS = frozenset(entry.name for entry in fields(Receipt))  # others were written by another version


def receipt_name(stage: str, shard: str) -> str:
    """Where a receipt stands in the run directory."""
    return f"receipts/{stage}/{shard}.json"


def write_receipt(store: Store, stage: str, receipt: Receipt) -> Receipt:
    """File the receipt if the shard has none yet; return the one that counts.

    Of two attempts that end at the same moment one wins, and readers trust only the files that it names.
    """
    if store.create_json(receipt_name(stage, receipt.shard), asdict(receipt)):
        return receipt
    filed = read_receipt(store, stage, receipt.shard)
    assert filed is not None
    return filed


def read_receipt(store: Store, stage: str, shard: str) -> Receipt | None:
    """The receipt of one shard; None while the stage has not finished it.

    Raises:
        UserError: it is damaged.
    """
    name = receipt_name(stage, shard)
    value = store.read_json(name)
    try:
        return None if value is None else Receipt(**{key: value[key] for key in value if key in _KEYS})
    except (TypeError, ValueError) as error:
        raise UserError(f"{store.url}/{name} is damaged: {error}") from None


def read_receipts(store: Store, stage: str) -> Iterator[Receipt]:
    """All receipts of a stage, in the order of their shards.

    Raises:
        UserError: one is damaged.
    """
    for name in store.names(f"receipts/{stage}", ".json"):
        receipt = read_receipt(store, stage, name.removesuffix(".json"))
        if receipt is not None:
            yield receipt
