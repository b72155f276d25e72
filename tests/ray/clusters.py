"""The cluster that the tests of a session share."""

from __future__ import annotations


def start_cluster() -> None:
    """Start a local cluster with two CPUs, whatever clusters run on the machine."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
