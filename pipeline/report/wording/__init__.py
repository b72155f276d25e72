"""The sentences that a user reads about an answer, one module per subject.

A function here takes numbers, or records of this package or of packages above it, and returns words; the modules that
compute hold the numbers. No sentence may claim more than the guarantee of its answer.
"""
