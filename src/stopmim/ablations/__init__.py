"""The tables of the paper, or of your own: planned, trained, measured, reported."""
