"""Computations: passes over a language model, detectors, selection. This package does not import ray."""

import os

__version__ = "0.10.0"

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Read when torch is imported: idle OpenMP threads sleep; by default they occupy cores that other processes need."""
