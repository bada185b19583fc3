"""Streams of blocks that break off."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from ringformer.checkpoints import zarr_files
from ringformer.convert.block_streams import BlockStream, _StreamHandler


@pytest.mark.parametrize("blocks", [1, zarr_files.CHUNKS_AT_ONCE + 2])
def test_a_stream_that_breaks_off_leaves_no_write_under_way(monkeypatch, tmp_path, blocks):
    """Or whoever removes the folder would remove it under a writer, which makes it anew."""
    begun, ended = [], []

    class Slow:
        def __init__(self, store):
            self.store = store

        def __getitem__(self, index):
            return Slow(self.store[index])

        async def write(self, block, **options):
            begun.append(block)
            await asyncio.sleep(0.01)
            await self.store.write(block, **options)
            ended.append(block)

    real = zarr_files.ts.open

    async def opened(*args, **options):
        return Slow(await real(*args, **options))

    async def ready():
        pass

    def stream():
        for n in range(blocks):
            yield (slice(n, n + 1),), np.full(1, n, np.float32)
        raise ValueError("a number that is not finite")

    monkeypatch.setattr(zarr_files, "ts", SimpleNamespace(open=opened, TensorStore=Slow))
    weight = SimpleNamespace(shape=(20,), chunk=(1,))
    place = {"parent_dir": tmp_path, "name": "x", "use_zarr3": True, "is_ocdbt_checkpoint": False}
    infos = [SimpleNamespace(await_path_creation=ready, **place)]
    with pytest.raises(ValueError, match="not finite"):
        asyncio.run(_StreamHandler().serialize([BlockStream(weight, np.dtype("float32"), stream())], infos))
    assert len(begun) == len(ended) == blocks == len(list((tmp_path / "x").glob("[0-9]*")))
