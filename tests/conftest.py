"""One thread per test process: pytest-xdist already uses every core, and equal sums need it."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes

import torch

torch.set_num_threads(1)
