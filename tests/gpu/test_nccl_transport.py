"""cupy's NCCL behind our transport, as far as one GPU can show it."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU"),
]


def test_one_rank_sends_to_itself_from_gpu_and_host_memory() -> None:
    pytest.importorskip("cupy", reason="cupy is not installed; install the [gpu] extra")
    import torch.distributed as dist

    from actors.nccl_transport import NcclTransport
    from placement.ids import WorkerId

    me = WorkerId(7)
    transport = NcclTransport("test", (me,), me, dist.HashStore(), timeout_s=30)
    try:
        for device in ("cuda", "cpu"):
            sent = torch.arange(1 << 16, dtype=torch.int64, device=device)
            received = torch.zeros_like(sent)
            transport.exchange([(me, sent)], [(me, received)])
            assert torch.equal(sent, received)
    finally:
        transport.close()
