"""From the answer of a run to files that one can use: cleaned data, what to remove, samples for a harness."""
