"""One training loop, resumable."""
