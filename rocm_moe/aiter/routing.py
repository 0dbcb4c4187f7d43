"""Routing as AITER can take it: local ids only, each at most once a token, weight 0 where a slot is not ours.

AITER indexes its weights with the ids as they are: -1 reads outside them, and SiTU's a16w4 refuses `expert_mask`. So a
slot that is not on this rank gets an expert that the token does not use otherwise, with weight 0: an ordinary call
whose sum is unchanged, as 0 times a finite value is 0. Experts whose output may not be finite are refused by `prepare`.
"""

from __future__ import annotations

import torch


def local_slots(top_k: int, num_local: int) -> int:
    """Return how many slots a token can fill here: an expert is taken at most once."""
    return min(top_k, num_local)


def remap(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, first: int, num_local: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn ids of the whole layer into this rank's, without a host sync and with sizes that depend on T and K only.

    topk_ids:      (T, K) int32 or int64; -1 and ids outside first ... first + num_local - 1 contribute nothing
    topk_weights:  (T, K) float32
    returns        (T, S) int32 ids in 0 ... num_local - 1, distinct in a row; (T, S) float32 weights, 0 for filled
                   slots; (T,) bool, whether the token has any local expert; S = min(K, num_local)

    An expert that is named twice in a row is taken once, with the sum of both weights.
    """
    tokens, top_k = topk_ids.shape
    slots = local_slots(top_k, num_local)
    local = topk_ids.long() - first
    here = (local >= 0) & (local < num_local)
    same = (local[:, :, None] == local[:, None, :]) & here[:, None, :]
    weights = torch.where(same, topk_weights.float()[:, None, :], 0.0).sum(-1)
    kept = here & ~same.tril(-1).any(-1)
    if slots < top_k:
        order = kept.int().argsort(dim=1, descending=True, stable=True)[:, :slots]
        local, kept, weights = local.gather(1, order), kept.gather(1, order), weights.gather(1, order)
    # Candidates: 2S consecutive ids, of which the row uses at most S; they start elsewhere for each token, so that
    # filled slots spread over the experts.
    count = min(2 * slots, num_local)
    start = torch.arange(tokens, device=local.device)[:, None] * slots
    candidates = (start + torch.arange(count, device=local.device)) % num_local
    free = ~((local[:, :, None] == candidates[:, None, :]) & kept[:, :, None]).any(1)
    free_rank = free.int().cumsum(1)
    gap_rank = (~kept).int().cumsum(1)
    choice = (free[:, None, :] & (free_rank[:, None, :] == gap_rank[:, :, None])).int().argmax(-1)
    ids = torch.where(kept, local, candidates.gather(1, choice)).int()
    return ids, torch.where(kept, weights, 0.0), here.any(1)
