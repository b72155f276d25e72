"""Evidence -> one score a document; one file a family."""
