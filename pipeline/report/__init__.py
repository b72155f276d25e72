"""The report of a run: an HTML page, the same facts as JSON, and figures, all read from the run directory."""

from pipeline.report.page import rewrite_report, write_report

__all__ = ["rewrite_report", "write_report"]
