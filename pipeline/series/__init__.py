"""Schedules of scans: a ledger of claims and results, and the summary of all scans."""
