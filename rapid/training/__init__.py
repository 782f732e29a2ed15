"""Training: one loop, its checkpoints, the weight average, and the folder in which a run can be resumed."""

from rapid.training.checkpoint import Checkpoint
from rapid.training.loop import Trainer
from rapid.training.run_folder import RunFolder

__all__ = ["Checkpoint", "RunFolder", "Trainer"]
