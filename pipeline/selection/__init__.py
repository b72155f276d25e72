"""From scores to selected documents: ranks, counts of ranks, and a decision with its guarantee."""

from pipeline.selection import procedures as procedures  # first: its modules import those that import it
