"""A shelf for chunks of weights without Ray: a handle is the chunk itself."""

from typing import Any

from actors.weight_chunks import WeightChunk


class ListShelf:
    def put(self, chunk: WeightChunk) -> Any:
        chunk.buffer.flags.writeable = False  # as Ray's are
        return chunk

    def get(self, handle: Any) -> WeightChunk:
        assert isinstance(handle, WeightChunk)
        return handle
