"""Streams of blocks that break off."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from ringformer.convert import block_streams
from ringformer.convert.block_streams import BlockStream, _StreamHandler


@pytest.mark.parametrize("blocks", [1, block_streams.WRITES_AT_ONCE + 2])
def test_a_stream_that_breaks_off_leaves_no_write_under_way(monkeypatch, blocks):
    """Or whoever removes the folder would remove it under a writer, which makes it anew."""
    begun, ended = [], []

    class Store:
        def __getitem__(self, index):
            return self

        def write(self, block, **options):
            begun.append(block)

            async def slow():
                await asyncio.sleep(0.01)
                ended.append(block)

            return slow()

    async def opened(*args, **options):
        return Store()

    async def ready():
        pass

    def stream():
        for n in range(blocks):
            yield (slice(0, 1),), np.full(1, n)
        raise ValueError("a number that is not finite")

    monkeypatch.setattr(block_streams.ts, "open", opened)
    monkeypatch.setattr(block_streams, "location", lambda info: {})
    monkeypatch.setattr(block_streams, "array_metadata", lambda *args: {})
    weight = SimpleNamespace(shape=(8,), chunk=(1,))
    infos = [SimpleNamespace(await_path_creation=ready)]
    with pytest.raises(ValueError, match="not finite"):
        asyncio.run(_StreamHandler().serialize([BlockStream(weight, np.dtype("float32"), stream())], infos))
    assert len(begun) == len(ended) == blocks
