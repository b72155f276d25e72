"""Receipts of shards that nobody scored."""

from pipeline.store.receipts import FileRecord, Receipt


def receipt_of(shard: str, data: str = "scores/a.parquet") -> Receipt:
    """A receipt of three documents."""
    fingerprint = {"dtype": "float32", "model": "0" * 64}
    files = {data: FileRecord(3, 1000, "1" * 64)}
    return Receipt(shard, "audit", 3, 3, 0, data, None, {}, fingerprint, files, "2" * 64)
