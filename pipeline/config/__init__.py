"""The configuration that a user writes: settings with a description of every field."""
