"""The GELU of compiled steps is GELU; test_gpu.py has it compiled, on a GPU."""

import torch
import torch.nn.functional as F

from stopmim.activation import _Gelu, tail


def test_the_fast_gelu_and_its_slope_are_exact_to_two_millionths() -> None:
    x = torch.linspace(-40, 40, 80001).requires_grad_()
    exact = F.gelu(x.double())
    found = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    (slope,) = torch.autograd.grad(exact.sum(), x)
    (found_slope,) = torch.autograd.grad(found.sum(), x)
    # tanh's GELU is off by 5e-4
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(found_slope, slope, rtol=0, atol=2e-6)


def test_small_values_far_out_are_right_in_relation_to_themselves() -> None:
    z = torch.linspace(0, 5.5, 1001, dtype=torch.float64)
    exact = torch.special.erfc(z * 0.5**0.5) / 2
    torch.testing.assert_close(tail(z.float()).double(), exact, rtol=2e-5, atol=0)
