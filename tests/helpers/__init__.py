"""What tests of several folders share: runs, models, servers, clusters and commands that they make."""
