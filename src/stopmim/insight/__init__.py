"""What a run has learned, to look at: figures and the report."""
