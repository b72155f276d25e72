"""The run directory, knowing nothing of what is in it."""
