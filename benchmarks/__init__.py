"""One file a claim about speed, and one that checks the tests; each prints one JSON line."""
