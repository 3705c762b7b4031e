"""What a run has learned, as arrays and as figures: nothing here is needed by training."""
