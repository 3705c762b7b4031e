"""Figures and a page about what a run has learned. Training does not need them."""
