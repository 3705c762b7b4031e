"""Tables of the paper, or your own: planned, trained, measured, reported."""
