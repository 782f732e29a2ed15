import torch
from torch import Tensor, nn

from rapid.dp.gradients import ROUNDING_MARGIN, BookKeeper, Direct, Gradient, register, rule_of


def standardise(weight: Tensor) -> Tensor:
    """Mean 0 and variance 1 for each output channel."""
    variance, mean = torch.var_mean(weight, (1, 2, 3), keepdim=True)
    return (weight - mean) * torch.rsqrt(variance + 1e-5)


class StandardisedConv2d(nn.Conv2d):
    """A convolution with standardised weights (Qiao et al. 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (N, C, H, W)."""
        return self._conv_forward(x, standardise(self.weight), self.bias)


@register(StandardisedConv2d)
def standardised_conv2d(layer: StandardisedConv2d, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
    """The rule of the convolution, and the chain rule."""
    gradients = rule_of(nn.Conv2d)(layer, grad, count, x)
    _, pull_back = torch.func.vjp(standardise, layer.weight.detach())
    by_example = gradients["weight"].instantiate().gradients
    gradients["weight"] = Direct(torch.func.vmap(lambda g: pull_back(g)[0])(by_example))
    return gradients


# the test: clipped sums against a loop over single examples
torch.manual_seed(0)
network = nn.Sequential(StandardisedConv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
images, clip_norm = torch.randn(5, 1, 8, 8), 0.1


def losses(x: Tensor) -> Tensor:
    """One for each image, float (N,)."""
    return network(x).square().sum(1)


sums, _ = BookKeeper(network).clipped_sum(lambda: losses(images), len(images), clip_norm)
expected = [torch.zeros_like(p) for p in network.parameters()]
for image in images:
    gradients = torch.autograd.grad(losses(image[None]).sum(), list(network.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    for total, gradient in zip(expected, gradients, strict=True):
        total.add_(gradient * min(1.0, clip_norm / (1 + ROUNDING_MARGIN) / norm))
for found, total in zip(sums, expected, strict=True):
    torch.testing.assert_close(found.float(), total, rtol=1e-3, atol=1e-6)
