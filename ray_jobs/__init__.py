"""Where work runs: ray is imported here, and nowhere in `pipeline`. Each file is one job."""
