"""One file a claim about speed; each prints one JSON line."""
