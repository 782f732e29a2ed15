import torch
from torch import nn

from rapid.dp import DpSgdSpec, PrivateMechanism, calibrate

x, y = torch.randn(2000, 16), torch.randint(0, 3, (2000,))
network = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))

spec = DpSgdSpec(name="classifier", dataset_size=len(x), expected_batch=200, steps=100, clip_norm=1.0)
budget = calibrate([spec], epsilon=2, delta=1e-5)


def losses(i: torch.Tensor) -> torch.Tensor:
    """One for each index, float (n,)."""
    return nn.functional.cross_entropy(network(x[i]), y[i], reduction="none")


mechanism = PrivateMechanism(budget.main, network, losses, physical_batch=256)
optimizer = torch.optim.Adam(mechanism.parameters, lr=1e-3)
for _ in range(spec.steps):
    for parameter, gradient in zip(mechanism.parameters, mechanism.gradient(), strict=True):
        parameter.grad = gradient
    optimizer.step()
print(f"epsilon {budget.spent:.3f} at delta {budget.delta}")
