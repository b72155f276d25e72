"""What a model is asked about a text."""
