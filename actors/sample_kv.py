"""The KV of one sample on its way from one worker to another, and whether it is that sample's.

Bytes and a description; what the bytes mean is the engines' business. Nothing here knows a
tensor, so that a coordinator can pass it on.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from placement.ids import SampleId
from placement.samples import Sample


@dataclass(frozen=True, slots=True)
class SampleKv:
    """The KV blocks of a sample's first tokens, in host memory.

    Attributes:
        num_tokens: tokens that the KV was computed for; the last block may be partly filled.
        token_digest: of the ids of these tokens (``digest_tokens``).
        block_layout: per layer, data type and shape of a block; a worker with another one cannot
            use the bytes.
        layers: per layer, [blocks, bytes of a block], contiguous.
        weight_version: of the weights that it was computed with; with others it is worthless.
    """

    num_tokens: int
    token_digest: bytes
    block_layout: tuple[tuple[str, str], ...]
    layers: tuple[npt.NDArray[np.uint8], ...]
    weight_version: str = "0"

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def num_blocks(self) -> int:
        return len(self.layers[0])

    def is_of(self, sample: Sample) -> bool:
        """Computed for the first tokens of this very sample, and not for all of them: the last
        one has to be decoded."""
        return (
            0 < self.num_tokens < sample.context_tokens
            and digest_tokens(sample, self.num_tokens) == self.token_digest
        )


def digest_tokens(sample: Sample, num_tokens: int) -> bytes:
    """Of the sample's first tokens, prompt included."""
    ids = (*sample.prompt_ids, *sample.generated_ids)[:num_tokens]
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class FetchedKv:
    """KV of several samples, as whoever asked for it has it in hand.

    Attributes:
        sample_ids: of those that were still there.
        payload: what ``WorkerPort.submit`` takes: the mapping itself, or Ray's reference to it,
            which spares the coordinator the bytes.
    """

    sample_ids: tuple[SampleId, ...]
    num_bytes: int
    payload: Any


KvBySample = Mapping[SampleId, SampleKv]
