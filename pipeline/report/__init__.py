"""The report of a run: an HTML page, the same facts as JSON, and figures, all read from the run directory."""
