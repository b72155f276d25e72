"""Models on disk: checkpoints, tokenizers and adapters."""
