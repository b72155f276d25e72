"""Passes of a text through a model: forward, gradient, generate, paraphrase."""
