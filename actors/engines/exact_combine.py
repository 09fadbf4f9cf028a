"""The placement-invariant combine of expert outputs.

The usual combine lets each rank add up what its experts contribute to a token, then adds the
partial sums of the ranks: the order of additions, and so the last bits, depend on which
expert lives where. Here each (token, top-k slot) is one row, computed by the one rank that
owns the expert and sent unrounded-again to the token's home rank, which adds the k slots in
slot order in float32. Which rank computed a row no longer matters.

Cost: each row travels once, k rows per token, where the usual reduce-scatter moves one.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

ExpertRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [R, H], local expert index [R]) -> unweighted expert outputs [R, H]."""


def combine_slots(slots_MKH: torch.Tensor, weights_MK: torch.Tensor) -> torch.Tensor:
    """Weighted sum over the K slots in slot order, in float32, as [M, H] in the slots' type."""
    total_MH = slots_MKH[:, 0].float() * weights_MK[:, 0, None].float()
    for slot in range(1, slots_MKH.shape[1]):
        total_MH += slots_MKH[:, slot].float() * weights_MK[:, slot, None].float()
    return total_MH.to(slots_MKH.dtype)


def exact_experts(
    hidden_MH: torch.Tensor,
    weights_MK: torch.Tensor,
    expert_ids_MK: torch.Tensor,
    expert_rows: ExpertRows,
    *,
    local_index_E: torch.Tensor,
    owner_rank_E: torch.Tensor,
    rank: int,
    tokens_per_rank: list[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Expert output of this rank's own tokens, [tokens_per_rank[rank], H].

    Args:
        hidden_MH, weights_MK, expert_ids_MK: of all ranks' tokens, in rank order.
        local_index_E: index of each expert in this rank's weights; anything where it is not
            this rank's.
        owner_rank_E: rank that owns each expert.
        group: of all ranks; None when there is one.
    """
    num_slots = expert_ids_MK.shape[1]
    hidden_size = hidden_MH.shape[1]
    owner_S = owner_rank_E[expert_ids_MK.reshape(-1).long()]  # S = M * K, token-major
    mine = torch.nonzero(owner_S == rank).flatten()
    rows = hidden_MH.new_empty((mine.numel(), hidden_size))
    if mine.numel():
        experts = local_index_E[expert_ids_MK.reshape(-1)[mine].long()]
        rows = expert_rows(hidden_MH[mine // num_slots].contiguous(), experts)
    first = sum(tokens_per_rank[:rank])
    own_weights = weights_MK[first : first + tokens_per_rank[rank]]
    if group is None:
        return combine_slots(rows.view(-1, num_slots, hidden_size), own_weights)

    # `mine` is ascending and tokens lie in rank order: the rows are already sorted by the
    # rank they go to. Both sides derive the counts from what both know.
    bounds = [0]
    for tokens in tokens_per_rank:
        bounds.append(bounds[-1] + tokens * num_slots)
    edges = torch.searchsorted(mine, torch.tensor(bounds, device=mine.device)).tolist()
    send_counts = [edges[i + 1] - edges[i] for i in range(len(tokens_per_rank))]
    home_owner = owner_S[bounds[rank] : bounds[rank + 1]]
    receive_counts = torch.bincount(home_owner, minlength=len(tokens_per_rank)).tolist()
    if not mine.numel():  # gloo refuses an empty send buffer: one row to ourselves, then dropped
        rows = hidden_MH.new_zeros((1, hidden_size))
        send_counts[rank] = receive_counts[rank] = 1
    received = rows.new_empty((sum(receive_counts), hidden_size))
    dist.all_to_all_single(received, rows, receive_counts, send_counts, group=group)
    if not mine.numel():
        at = sum(receive_counts[:rank])
        received = torch.cat([received[:at], received[at + 1 :]])
    slots = torch.empty_like(received)
    # Rows arrive sorted by owner, then by slot: a stable sort of the owners gives their places.
    slots[torch.argsort(home_owner, stable=True)] = received
    return combine_slots(slots.view(-1, num_slots, hidden_size), own_weights)
