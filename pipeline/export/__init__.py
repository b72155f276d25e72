"""Write the answer of a run as usable files: cleaned data, a list to remove, or samples for a harness."""
