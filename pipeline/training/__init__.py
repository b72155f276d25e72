"""The resumable training loop."""
