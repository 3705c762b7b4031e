"""One file per format of weights."""
