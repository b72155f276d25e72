"""Open what is asked about."""
