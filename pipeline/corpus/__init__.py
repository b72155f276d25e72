"""Reading of documents: from paths to checked documents."""
