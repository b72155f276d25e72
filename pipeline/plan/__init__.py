"""Before scoring: from a configuration to planned work, with checks of documents and a forecast."""
