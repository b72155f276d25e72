"""The state of a run directory: what it audits, what is scored, and the records of its answers."""
