"""Documents in versions: one is published, drawn at random; the others and the drawn index stay secret."""
