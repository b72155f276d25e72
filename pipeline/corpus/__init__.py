"""From paths to checked documents."""
