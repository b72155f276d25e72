"""What a user writes: settings with a sentence under every field."""
