"""One module a check: what an answer assumes, on samples before scoring and on score files after it."""
