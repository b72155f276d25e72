"""Trials: audits of models whose training data is known, compared with the truth."""
