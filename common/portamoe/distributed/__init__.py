"""Experts spread over the ranks of a torch.distributed group, with the result of one process.

`ExpertParallel` wraps one rank's `RoutedExperts`; `RankGroup` is what several layers share; `RankError` names the rank
that died or did not come. `torchrun -m portamoe.distributed.selftest` shows whether it works on a cluster.
"""

from portamoe.distributed.expert_parallel import ExpertParallel
from portamoe.distributed.placement import split_experts
from portamoe.distributed.rank_group import RankGroup
from portamoe.distributed.watch import RankError

__all__ = ["ExpertParallel", "RankError", "RankGroup", "split_experts"]
