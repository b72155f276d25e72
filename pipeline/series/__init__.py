"""Series of scans: a ledger of claims and results, and what it says of them all."""
