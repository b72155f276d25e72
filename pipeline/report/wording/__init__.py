"""The sentences about an answer for users, one module per subject.

A function takes numbers, or records of this package or of packages above it, and returns text; the modules that
compute hold the numbers. No sentence may claim more than the guarantee of its answer.
"""
