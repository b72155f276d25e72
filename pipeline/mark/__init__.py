"""Documents in versions: one is published, drawn at random; the others and the draw stay secret."""
