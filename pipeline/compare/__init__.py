"""Compare finished runs: changes between two runs, documents clean under several models, and repaired benchmarks."""
