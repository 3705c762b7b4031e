"""Figures and a report on what a run has learned. Training does not need them."""
