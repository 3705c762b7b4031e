"""The reliability campaign: thousands of faults, each a function of a seed and a number.

One file per family of faults; processes.py starts and watches commands, cases.py runs the cases of
a family in forks, record.py writes down what came out. ``make campaign`` takes minutes,
``make campaign LONG=1`` hours. It shares its helpers with the tests.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
# Before torch is imported: cases share the cores, and equal sums need equal threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
