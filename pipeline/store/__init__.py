"""The run directory: files, receipts, lock and attempt logs, independent of their content."""
