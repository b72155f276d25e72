"""The run directory: files, receipts, lock, attempt logs; independent of what is stored."""
