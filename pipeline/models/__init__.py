"""Models on disk: checkpoints, tokenizers, adapters."""
