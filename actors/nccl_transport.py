"""GPU memory between workers: NCCL through cupy, on a stream of its own.

torch's NCCL groups would share the model's communicators and cannot be given up while a peer
hangs; a communicator of our own can be aborted. cupy brings the bindings in a wheel.

Not exercised with peers anywhere yet: a test sends to itself where there is a GPU.
"""

import time

import cupy
import torch
import torch.distributed as dist
from cupy.cuda import nccl

from placement.errors import MembershipError
from placement.ids import WorkerId

POLL_S = 0.001
"""Between two looks at a transfer in flight: far below the milliseconds that one takes."""


class NcclTransport:
    """A ``Transport`` over the given workers; returns when all of them have come.

    Args:
        store: where the first member leaves the communicator's id.
        timeout_s: bound on one exchange.
    """

    def __init__(
        self,
        name: str,
        members: tuple[WorkerId, ...],
        worker_id: WorkerId,
        store: dist.Store,
        timeout_s: float,
    ) -> None:
        self._rank_of = {member: rank for rank, member in enumerate(members)}
        self._timeout_s = timeout_s
        self._stream = cupy.cuda.Stream(non_blocking=True)
        rank = self._rank_of[worker_id]
        key = f"{name}/nccl-id"
        if rank == 0:
            store.set(key, ",".join(map(str, nccl.get_unique_id())))
        unique_id = tuple(int(part) for part in store.get(key).decode().split(","))
        self._communicator = nccl.NcclCommunicator(len(members), unique_id, rank)

    def exchange(
        self,
        sends: list[tuple[WorkerId, torch.Tensor]],
        receives: list[tuple[WorkerId, torch.Tensor]],
    ) -> None:
        """See ``Transport``. Host tensors (checksums) are staged through the GPU."""
        outgoing = [(peer, tensor.cuda().contiguous()) for peer, tensor in sends]
        incoming = [
            (peer, tensor, tensor if tensor.is_cuda else torch.empty_like(tensor, device="cuda"))
            for peer, tensor in receives
        ]
        torch.cuda.current_stream().synchronize()  # what is sent must have been written
        nccl.groupStart()
        for peer, tensor in outgoing:
            self._communicator.send(
                tensor.data_ptr(),
                tensor.numel() * tensor.element_size(),
                nccl.NCCL_UINT8,
                self._rank_of[peer],
                self._stream.ptr,
            )
        for peer, _, staged in incoming:
            self._communicator.recv(
                staged.data_ptr(),
                staged.numel() * staged.element_size(),
                nccl.NCCL_UINT8,
                self._rank_of[peer],
                self._stream.ptr,
            )
        nccl.groupEnd()
        self._wait()
        for _, tensor, staged in incoming:
            if staged is not tensor:
                tensor.copy_(staged)

    def _wait(self) -> None:
        done = cupy.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + self._timeout_s
        while not done.done:
            if time.monotonic() > deadline:
                self._communicator.abort()
                raise MembershipError(
                    f"a peer did not take part in a transfer within {self._timeout_s} s"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        self._communicator.destroy()
