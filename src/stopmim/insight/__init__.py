"""Figures and a report on what a run has learned. Training does not need them."""

from typing import Literal

# The analyses, here because the command line names them before torch and matplotlib are imported.
What = Literal[
    "noise", "similarity", "prediction", "collapse", "smoothing", "pca", "masks", "uncertainty",
    "neighbours",
]  # fmt: skip
