"""Checkpoints on disk as sources of experts: Kimi-K3, Kimi-K3-NVFP4 and gpt-oss, in the formats of `_registry`."""

from portamoe.checkpoints._experts import CheckpointExperts
from portamoe.checkpoints._load import Checkpoint, load_experts
from portamoe.checkpoints._progress import loading_bar
from portamoe.checkpoints.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "CheckpointExperts", "load_experts", "loading_bar"]
