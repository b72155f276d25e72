"""A shard -> one file and one receipt."""
