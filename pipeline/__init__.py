"""What is computed: passes over a language model, detectors, selection. Nothing here imports ray."""

__version__ = "0.10.0"
