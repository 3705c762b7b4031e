"""The paper's 1 % protocol: few labels, and logistic regression solved to its optimum.

The released code (logistic_eval.py:189-201) stops its solver early and reports an approximate
optimum. Here the result is the optimum, whatever the solver, and l2 is the only setting.

Shapes: N samples, D features, K classes.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stopmim.base.errors import UserError
from stopmim.base.random_keys import torch_generator

ROUNDS = 8  # of 10, 40, 160, ... iterations
COARSE = 5e-7  # relative gap that float32 can reach, roughly
STALLED = {torch.float32: 1e-7, torch.float64: 1e-14}  # relative gain of ten iterations
NEVER = -1000.0  # intercept of a class without samples; its exp is zero in float64


def per_class(y: Tensor, n: int, seed: int) -> list[int]:
    """Draws `n` samples of each class by (seed, class); small classes contribute every sample."""
    if n < 1:
        raise UserError(f"--per-class {n}: at least one image of each class is needed")
    found: list[int] = []
    for label in y.unique().tolist():
        own = (y == label).nonzero()[:, 0].cpu()
        order = torch.randperm(len(own), generator=torch_generator("few", seed, label))
        found += own[order[:n]].tolist()
    return sorted(found)


def classify(
    x: Tensor,
    y: Tensor,
    test_x: Tensor,
    lambd: float,
    statistics: Literal["train", "test"] = "train",
) -> Tensor:
    """Predicts labels (n,) of test features by logistic regression without intercept.

    The penalty l2 is `lambd` / N, as in the released code. Mean and deviation of `statistics`
    standardise test features. The released code uses "test" (logistic_eval.py:227-229), which makes
    each answer depend on the other images.
    """
    weights = fit_logistic(standardise(x, x), y, lambd / len(y), tolerance=1e-6)
    return (standardise(test_x, x if statistics == "train" else test_x) @ weights.T).argmax(dim=1)


def standardise(x: Tensor, like: Tensor) -> Tensor:
    """Subtracts the mean of `like` from `x` and divides by its (unbiased) deviation, in float64."""
    mean, std = like.double().mean(dim=0), like.double().std(dim=0)
    # The deviation of a constant feature is rounding error: dividing by it would amplify noise.
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
    """Returns the weights (K, D), or (K, D + 1) with the intercept last, float64, that minimise

        mean cross-entropy of softmax(W x) and y  +  l2 / 2 ||W||_F^2

    with no penalty on the intercept. The released code's `lambd` is N times this l2. A ValueError
    says that there is nothing to separate, or that no optimum is reached.

    Args:
        x: features (N, D).
        y: labels (N,), 0 to K - 1.
        l2: positive; without it separable classes have no optimum.
        classes: K, if larger than the largest label plus one.
        tolerance: relative gap allowed between the objective and its minimum. The gradient bounds
            it (estimates it, with an intercept), unless float64 cannot resolve it.
    """
    (weights,) = fit_each(x, y, [l2], intercept, classes=classes, tolerance=tolerance)
    return weights


def fit_each(
    x: Tensor,
    y: Tensor,
    l2s: Sequence[float],
    intercept: bool = False,
    *,
    classes: int | None = None,
    tolerance: float = 1e-12,
) -> list[Tensor]:
    """Weights as from `fit_logistic` for each of `l2s`; work on the features alone is shared."""
    n, d = x.shape
    present, y = y.long().unique(return_inverse=True)  # sorted; labels renumbered
    k = int(present[-1]) + 1 if classes is None else classes
    if len(present) < 2:
        raise ValueError(f"all {n} labels are {int(present[0])}: there is nothing to separate")
    if not 0 <= int(present[0]) <= int(present[-1]) < k:
        raise ValueError(f"labels from {present[0]} to {present[-1]} for {k} classes")
    for l2 in l2s:
        if not l2 > 0:
            raise ValueError(f"l2 must be more than 0, got {l2}: else there may be no optimum")
    if not x.isfinite().all():
        raise ValueError("features must be finite")
    axes = _principal_axes(x.double(), intercept)
    if not intercept:
        return [_minimise(axes, present[y], l2, k, tolerance) for l2 in l2s]
    found = []
    for l2 in l2s:
        # Without samples, the intercept of a class goes to minus infinity and its weights to zero;
        # the others are unaffected. Their logits have mean zero, so NEVER is below all of them.
        weights = x.new_zeros(k, d + 1, dtype=torch.float64)
        weights[:, -1] = NEVER
        weights[present] = _minimise(axes, y, l2, len(present), tolerance)
        found.append(weights)
    return found


class _Objective:
    """The objective divided by l2, and its gradient, in the form that L-BFGS calls."""

    def __init__(self, x: Tensor, y: Tensor, penalty: Tensor, l2: float, weights: Tensor) -> None:
        self.x, self.label, self.penalty, self.l2 = x, y[:, None], penalty, l2
        self.weights, self.at, self.value = weights, torch.full_like(weights, torch.nan), torch.nan

    def __call__(self) -> float:
        """Computes everything from the sum over wrong classes: 1 - p cancels when p is near 1.

        In place where possible: the (N, K) matrix takes most of the memory and time.
        """
        if torch.equal(self.weights, self.at):  # L-BFGS evaluates some points twice
            return self.value
        self.at.copy_(self.weights)
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
        self.variance = float(missed.mean()) / p.shape[1]  # mean p (1 - p) of a class
        self.value = float(loss / self.l2 + (shrink * self.weights).sum(dtype=torch.double) / 2)
        return self.value

    def gap(self, curvature: Tensor) -> float:
        """Upper bound of the relative gap to the minimum, given the least curvature (D,)."""
        return float((self.gradient.double().square() / curvature).sum()) / 2 / self.value


class _Axes(NamedTuple):
    """Features in the coordinates of their principal axes, and the way back."""

    x: Tensor  # (N, D), or (N, D + 1) with a constant for the intercept
    variance: Tensor  # of each
    penalty: Tensor  # 1, or 0 for the intercept
    mean: Tensor  # (D,)
    axes: Tensor  # (D, D)
    unit: float


def _principal_axes(x: Tensor, intercept: bool) -> _Axes:
    n, d = x.shape
    unit = float(x.square().mean().sqrt()) or 1.0  # keeps float32 in range, whatever the unit
    x = x / unit
    mean = x.mean(dim=0) if intercept else x.new_zeros(d)
    variance, axes = torch.linalg.eigh((x - mean).T @ (x - mean) / n)  # (D,), (D, D)
    x, variance, penalty = (x - mean) @ axes, variance.clamp(min=0), torch.ones_like(variance)
    if intercept:  # a constant feature, orthogonal to the centred ones
        x = torch.cat([x, x.new_ones(n, 1)], dim=1)
        variance = torch.cat([variance, variance.new_ones(1)])
        penalty = torch.cat([penalty, penalty.new_zeros(1)])
    return _Axes(x, variance, penalty, mean, axes, unit)


def _minimise(along: _Axes, y: Tensor, l2: float, k: int, goal: float) -> Tensor:
    """L-BFGS in coordinates in which the Hessian is close to the identity.

    These are the principal axes of the features, scaled by the average p (1 - p) instead of each
    sample's own. The average falls by orders of magnitude on the way, so it is renewed in every
    round. Rounds run in float32, which is twice as fast, until that is too coarse; the gap is
    measured in float64 between them.
    """
    x, variance, penalty, mean, axes, unit = along
    l2, d = l2 / unit**2, len(mean)
    weights, dtype, floor = x.new_zeros(k, x.shape[1]), torch.float32, False
    for i in range(ROUNDS):
        exact = _Objective(x, y, penalty, l2, weights)
        exact()
        # 1 or more for the objective over l2, except along the intercept: there, an estimate.
        curvature = torch.where(penalty > 0, 1.0, exact.variance / l2)
        gap = exact.gap(curvature)
        if gap <= goal or floor:
            weights, bias = weights[:, :d] @ axes.T, weights[:, d:]  # (K, D), (K, 1) or (K, 0)
            return torch.cat([weights / unit, bias - weights @ mean[:, None]], dim=1)
        dtype = torch.float64 if gap <= 10 * COARSE else dtype
        # A quarter of the average, which few samples dominate, saves a sixth of the evaluations.
        scale = (exact.variance / l2 * variance / 4 + penalty).rsqrt()  # (D,)
        scaled = (weights / scale).to(dtype)
        inner = _Objective((x * scale).to(dtype), y, (penalty * scale**2).to(dtype), l2, scaled)
        begin = inner()
        enough = goal / 2 if dtype == torch.float64 else max(goal / 2, COARSE)
        if not _descend(inner, 4**i, enough, curvature * scale**2):
            # No gain in float64: this is as low as it gets.
            floor = dtype == torch.float64 and begin - inner() <= 1e-13 * begin
            dtype = torch.float64
        weights = scaled.double() * scale if inner() <= begin else weights
    raise ValueError(
        f"no optimum for l2 = {l2 * unit**2:.3g}: after {ROUNDS} rounds the objective may still be "
        f"{gap:.0e} too large, relatively; use a larger l2 or allow more tolerance"
    )


def _descend(objective: _Objective, steps: int, enough: float, curvature: Tensor) -> bool:
    """Descends until the gap is small enough; False if rounding prevents that."""
    how: Any = {"line_search_fn": "strong_wolfe", "tolerance_grad": 0, "tolerance_change": 0}
    lbfgs = torch.optim.LBFGS([objective.weights], max_iter=10, history_size=20, **how)
    for _ in range(steps):
        before = objective()
        lbfgs.step(objective)
        # Evaluated again: the last evaluation need not be where the line search ended.
        if not before - objective() > STALLED[objective.x.dtype] * before:  # NaN ends here, too
            return False
        if objective.gap(curvature) <= enough:
            break
    return True
