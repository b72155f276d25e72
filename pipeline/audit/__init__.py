"""One audit, from description to answer."""
