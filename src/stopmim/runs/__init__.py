"""A run on disk: its directory and its checkpoints."""
