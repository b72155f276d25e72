"""Trials: an audit of a model whose training data is known, compared with the truth."""
