"""After scoring: selections, verdicts and evaluations, with their sentences."""
