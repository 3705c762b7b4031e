"""The paper's 1 % protocol: few labels, and logistic regression solved to its optimum.

The released code (logistic_eval.py:189-201) stops its solver early, and what it reports is of an
approximate optimum. Here the answer is the optimum, whatever the solver: l2 is all there is to set.

Shapes: N samples, D features, K classes.
"""

from pathlib import Path, PurePosixPath
from typing import Literal

import torch
from torch import Tensor

from stopmim.base.errors import DataError, UserError
from stopmim.base.random_keys import torch_generator
from stopmim.data.images import Images

LAMBDA = 0.0025  # of the README of StoP and of MSN; the script's own default is a tenth of it
ROUNDS = 8  # of 10, 40, 160, ... iterations
COARSE = 5e-7  # relative gap that float32 can reach, about
STALLED = {torch.float32: 1e-7, torch.float64: 1e-14}  # relative gain of ten iterations
NEVER = -1000.0  # intercept of a class without samples: exp of it is zero in float64


def per_class(y: Tensor, n: int, seed: int) -> list[int]:
    """`n` samples of each class, or all of a class that has fewer, drawn by (seed, class)."""
    if n < 1:
        raise UserError(f"--per-class {n}: at least one image of each class is needed")
    found: list[int] = []
    for label in y.unique().tolist():
        own = (y == label).nonzero()[:, 0].cpu()
        order = torch.randperm(len(own), generator=torch_generator("few", seed, label))
        found += own[order[:n]].tolist()
    return sorted(found)


def listed(images: Images, file: Path) -> list[int]:
    """The images that `file` names, one file name per line, as ``n04235860_14959.JPEG``.

    Folders do not count, so that the published list (``1percent.txt`` of SimCLR, MSN and StoP,
    12,811 names) fits any layout.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{file}: not a list of file names: {why}") from None
    names = [line.strip() for line in lines if line.strip()]
    place = {PurePosixPath(images.name(i)).name: i for i in range(len(images))}
    missing = [name for name in names if PurePosixPath(name).name not in place]
    if missing or not names:
        which = f"{missing[0]} and {len(missing) - 1} others" if missing else "it is empty"
        raise DataError(f"{file}: not among the {len(images)} training images: {which}")
    return sorted({place[PurePosixPath(name).name] for name in names})


def classify(
    x: Tensor,
    y: Tensor,
    test_x: Tensor,
    *,
    strength: float = LAMBDA,
    statistics: Literal["train", "test"] = "train",
) -> Tensor:
    """Labels (n,) of the test features by logistic regression without intercept.

    Args:
        strength: of the penalty, over the number of training samples.
        statistics: what test features are standardised by. The released code takes their own,
            "test" (logistic_eval.py:227-229): each answer then depends on the other test images.
    """
    weights = fit_logistic(standardise(x, x), y, strength / len(y), tolerance=1e-6)
    return (standardise(test_x, x if statistics == "train" else test_x) @ weights.T).argmax(dim=1)


def standardise(x: Tensor, like: Tensor) -> Tensor:
    """`x` less the mean of `like` and over its (unbiased) deviation, feature by feature, float64.

    The released code standardises the test set with its own statistics, `standardise(test, test)`;
    with those of the training set it would be `standardise(test, train)`.
    """
    mean, std = like.double().mean(dim=0), like.double().std(dim=0)
    # A constant feature has a deviation of rounding errors: dividing by it would make them large.
    return (x.double() - mean) / torch.where(std > 1e-6 * mean.abs(), std, 1.0)


def fit_logistic(
    x: Tensor,
    y: Tensor,
    l2: float,
    intercept: bool = False,
    *,
    classes: int | None = None,
    tolerance: float = 1e-12,
) -> Tensor:
    """The weights (K, D), or (K, D + 1) with the intercept last, float64, that minimise

        mean cross-entropy of softmax(W x) and y  +  l2 / 2 ||W||_F^2

    without a penalty on the intercept. The released code's `lambd` is N times this l2.

    Args:
        x: features (N, D).
        y: labels (N,), 0 to K - 1.
        l2: more than zero; without it separable classes have no optimum.
        classes: K, if it is more than the largest label plus one.
        tolerance: by how much, relatively, the objective may be above the least one. The gradient
            proves it (estimates it, with an intercept), or else float64 cannot do better.

    Raises:
        ValueError: nothing to separate, or nothing that can be solved.
    """
    n, d = x.shape
    present, y = y.long().unique(return_inverse=True)  # sorted, labels numbered by what is present
    k = int(present[-1]) + 1 if classes is None else classes
    if len(present) < 2:
        raise ValueError(f"all {n} labels are {int(present[0])}: there is nothing to separate")
    if not 0 <= int(present[0]) <= int(present[-1]) < k:
        raise ValueError(f"labels from {present[0]} to {present[-1]} for {k} classes")
    if not l2 > 0:
        raise ValueError(f"l2 must be more than 0, got {l2}: there may be no optimum without it")
    if not x.isfinite().all():
        raise ValueError("features must be finite")
    if not intercept:
        return _minimise(x.double(), present[y], l2, k, False, tolerance)
    # The intercept of a class without samples would go to minus infinity and its weights to zero.
    # The others are what they are without it. Their logits have mean zero, so that NEVER is less.
    weights = x.new_zeros(k, d + 1, dtype=torch.float64)
    weights[:, -1] = NEVER
    weights[present] = _minimise(x.double(), y, l2, len(present), True, tolerance)
    return weights


class _Objective:
    """The objective over l2, and its gradient, as L-BFGS asks for them while it moves `weights`."""

    def __init__(self, x: Tensor, y: Tensor, penalty: Tensor, l2: float, weights: Tensor) -> None:
        self.x, self.label, self.penalty, self.l2 = x, y[:, None], penalty, l2
        self.weights, self.at = weights, torch.full_like(weights, torch.nan)

    def __call__(self) -> float:
        if not torch.equal(self.weights, self.at):  # L-BFGS asks twice where a line search ends
            self.at.copy_(self.weights)
            self._evaluate()
        return self.value

    def _evaluate(self) -> None:
        """All from the sum over the wrong classes: 1 - p cancels when p is nearly 1, as it will be.

        In place where it can be: (N, K) is the largest thing here, and the time goes into it.
        """
        p = self.x @ self.weights.T  # logits, (N, K)
        top, own = p.amax(dim=1, keepdim=True), p.gather(1, self.label)  # (N, 1)
        p.sub_(top).exp_()
        right = p.gather(1, self.label)
        wrong = p.scatter_(1, self.label, 0.0).sum(dim=1, keepdim=True)
        loss = (top - own + torch.log1p(wrong + (right - 1))).double().mean()
        missed = wrong / (wrong + right)  # 1 - p of the right class, (N, 1)
        residual = p.div_(wrong + right).scatter_(1, self.label, -missed)  # p - onehot(y)
        shrink = self.penalty * self.weights
        self.gradient = (residual.T @ self.x).div_(len(p) * self.l2).add_(shrink)
        self.weights.grad = self.gradient
        self.value = float(loss / self.l2 + (shrink * self.weights).sum(dtype=torch.double) / 2)
        self.spread = float(missed.mean()) / p.shape[1]  # p (1 - p) of a class, on average

    def gap(self, curvature: Tensor) -> float:
        """At most how much of the value is too much, if it is curved by `curvature` (D,) at least.

        The objective over l2 is curved by 1, except along the intercept: there it is an estimate.
        """
        return float((self.gradient.double().square() / curvature).sum()) / 2 / self.value


def _minimise(x: Tensor, y: Tensor, l2: float, k: int, intercept: bool, goal: float) -> Tensor:
    """L-BFGS in coordinates in which the Hessian is near the identity.

    They are the axes of the features, scaled by the average p (1 - p) in the place of every
    sample's own. That average falls by orders of magnitude on the way, hence rounds that take it
    anew. These are in float32, which is twice as fast, until that is too coarse; the gap that
    counts is measured in float64, between them.
    """
    n, d = x.shape
    unit = float(x.square().mean().sqrt()) or 1.0  # float32 has no room for every unit there is
    x, l2 = x / unit, l2 / unit**2
    mean = x.mean(dim=0) if intercept else x.new_zeros(d)
    variance, axes = torch.linalg.eigh((x - mean).T @ (x - mean) / n)  # (D,), (D, D)
    x, variance, penalty = (x - mean) @ axes, variance.clamp(min=0), torch.ones_like(variance)
    if intercept:  # a feature that is 1: orthogonal to the others, now that they are centred
        x = torch.cat([x, x.new_ones(n, 1)], dim=1)
        variance = torch.cat([variance, variance.new_ones(1)])
        penalty = torch.cat([penalty, penalty.new_zeros(1)])
    weights, dtype, floor = x.new_zeros(k, x.shape[1]), torch.float32, False
    for i in range(ROUNDS):
        exact = _Objective(x, y, penalty, l2, weights)
        exact()
        curvature = torch.where(penalty > 0, 1.0, exact.spread / l2)
        gap = exact.gap(curvature)
        if gap <= goal or floor:
            weights, bias = weights[:, :d] @ axes.T, weights[:, d:]  # (K, D), (K, 1) or (K, 0)
            return torch.cat([weights / unit, bias - weights @ mean[:, None]], dim=1)
        dtype = torch.float64 if gap <= 10 * COARSE else dtype
        # A quarter of the average, which a few samples make: saves a sixth of the evaluations.
        scale = (exact.spread / l2 * variance / 4 + penalty).rsqrt()  # (D,)
        scaled = (weights / scale).to(dtype)
        inner = _Objective((x * scale).to(dtype), y, (penalty * scale**2).to(dtype), l2, scaled)
        begin = inner()
        enough = goal / 2 if dtype == torch.float64 else max(goal / 2, COARSE)
        if not _descend(inner, 4**i, enough, curvature * scale**2):
            # In float64, and nothing gained to speak of: this is as low as it can get.
            floor = dtype == torch.float64 and begin - inner() <= 1e-13 * begin
            dtype = torch.float64
        weights = scaled.double() * scale if inner() <= begin else weights
    raise ValueError(
        f"no optimum for l2 = {l2 * unit**2:.3g}: after {ROUNDS} rounds the objective may still be "
        f"{gap:.0e} too large, relatively; use a larger l2 or allow more tolerance"
    )


def _descend(objective: _Objective, steps: int, enough: float, curvature: Tensor) -> bool:
    """Moves the weights until the gap is small enough; False if rounding is in the way of that."""
    lbfgs = torch.optim.LBFGS(
        [objective.weights],
        max_iter=10,
        history_size=20,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    for _ in range(steps):
        before = objective()
        lbfgs.step(objective)
        # What was asked last may lie beside where the line search ended: ask there.
        if not before - objective() > STALLED[objective.x.dtype] * before:  # NaN: not, either
            return False
        if objective.gap(curvature) <= enough:
            break
    return True
