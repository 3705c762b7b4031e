"""Benchmarks classifiers: low-shot regression against scikit-learn's, and a grid of heads."""

import time
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.base.errors import UserError
from stopmim.base.random_keys import torch_generator
from stopmim.bench.timing import Line, machine, timed
from stopmim.evals.heads import Split, grid, train_heads
from stopmim.evals.lowshot import fit_logistic, standardise
from stopmim.evals.recipes import LAMBDA, Recipe

GOAL = 1e-6  # relative gap of the objective to its minimum
ITERATIONS = (25, 100, 400, 1600, 6400, 25600)  # of scikit-learn, until it reaches the goal
PATIENCE = 4  # scikit-learn is stopped after this many times our seconds
# Twelve heads with the schedule of ImageNet.
GRID = Recipe(
    28, milestones=(8, 16, 24), norms=("none",), lr_factors=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    weight_decays=(5e-4, 0.0),
)  # fmt: skip
# Images, features and classes: by default, of the 1 % protocol with a ViT-B, and of heads on a GPU.
SMALL, PAPER, ON_GPU = (2000, 192, 100), (12_811, 768, 1000), (100_000, 768, 1000)


def bench_probe(*, paper: bool = False) -> Iterator[Line]:
    """Times both, the regression also at the size of the `paper`."""
    size = PAPER if paper else SMALL
    yield from low_shot(*size)
    if torch.cuda.is_available():
        yield from heads(*ON_GPU, torch.device("cuda"))
    else:
        yield from heads(*size, torch.device("cpu"))


def low_shot(n: int, d: int, classes: int) -> Iterator[Line]:
    """Seconds until the objective is 1e-6 above its minimum: ours, scikit-learn's, their ratio.

    scikit-learn counts with its shortest fit that reaches the goal. If none does within four times
    our seconds, its `gap` tells how far it came, and the ratio is a lower bound.
    """
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise UserError('bench probe: needs scikit-learn: pip install "stopmim[test]"') from None

    x, y = problem(n, d, classes)
    l2 = LAMBDA / n
    begin = time.perf_counter()
    weights = fit_logistic(x, y, l2, tolerance=GOAL)
    ours = time.perf_counter() - begin
    least = objective(fit_logistic(x, y, l2, tolerance=1e-9), x, y, l2)
    about = {"n": n, "d": d, "classes": classes, **machine(torch.device("cpu"))}
    yield _line("stopmim", ours, objective(weights, x, y, l2) / least - 1) | about
    for steps in ITERATIONS:
        theirs = LogisticRegression(C=1 / LAMBDA, fit_intercept=False, tol=1e-12, max_iter=steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing convergence
            seconds = timed(theirs.fit, x.numpy(), y.numpy())
        gap = objective(torch.from_numpy(theirs.coef_), x, y, l2) / least - 1
        if gap <= GOAL or seconds > PATIENCE * ours:
            break
    yield _line("scikit-learn", seconds, gap) | about
    yield {"bench": "probe ratio scikit-learn / stopmim", "time": round(seconds / ours, 2)}


def heads(n: int, d: int, classes: int, device: torch.device) -> Iterator[Line]:
    """Trains twelve heads for 28 epochs; on a GPU also in float32, to compare with TF32."""
    x, y = problem(n + n // 10, d, classes)
    x = x.half()
    train, test = x[:n].to(device), x[n:].to(device)
    for tf32 in (True, False) if device.type == "cuda" else (False,):
        begin = time.perf_counter()
        split = Split([train], y[:n], test, y[n:], d)
        found = train_heads(grid(GRID, (1,)), GRID, split, device=device, tf32=tf32)
        seconds = time.perf_counter() - begin
        accuracy = found.correct[-1].double() / len(test)
        line: Line = {"bench": "heads", "heads": 12, "epochs": GRID.epochs, "tf32": tf32}
        line |= {"seconds": round(seconds, 3), "accuracy": [round(a, 4) for a in accuracy.tolist()]}
        yield line | {"n": n, "d": d, "classes": classes, **machine(device)}


def problem(n: int, d: int, classes: int) -> tuple[Tensor, Tensor]:
    """Standardised features like an encoder's: overlapping classes, variance in few directions."""
    generator = torch_generator("bench probe", n, d, classes)
    y = torch.arange(n) % classes
    means = torch.randn(classes, d, generator=generator)
    noise = torch.randn(n, d, generator=generator)
    spectrum = torch.arange(1, d + 1) ** -0.5
    rotation, _ = torch.linalg.qr(torch.randn(d, d, generator=generator))
    x = ((means[y] + 2 * noise) * spectrum) @ rotation
    return standardise(x, x), y


def objective(weights: Tensor, x: Tensor, y: Tensor, l2: float) -> float:
    return float(F.cross_entropy(x @ weights.T, y) + l2 / 2 * weights.square().sum())


def _line(solver: str, seconds: float, gap: float) -> Line:
    gap = float(f"{gap:.1e}")
    return {"bench": "probe", "solver": solver, "seconds": round(seconds, 3), "gap": gap}
