"""Detectors: evidence -> one score per document; one module per family."""
