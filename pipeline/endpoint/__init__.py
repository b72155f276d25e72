"""A model behind an OpenAI-compatible interface: asked within limits, every answer stored as it comes."""
