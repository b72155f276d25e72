"""Trials: an audit of a model whose training data is known, held against the truth."""
