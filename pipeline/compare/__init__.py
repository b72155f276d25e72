"""Finished runs side by side: what changed between two, what is clean under all of several, and benchmarks repaired."""
