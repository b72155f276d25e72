"""The run directory: files, receipts, lock, journal; independent of what is stored."""
