"""What a run has answered: summaries, their history, its status, and the texts that earlier runs audited."""
