"""Selection of documents from scores: ranks, counts of ranks, and a decision with its guarantee."""

from pipeline.selection import procedures as procedures  # first, because of circular imports
