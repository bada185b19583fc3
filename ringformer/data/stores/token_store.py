"""The token store: a folder with the tokens of many documents end to end, read through a memory map.

    store.json    format version, fingerprint, counts, and the settings it was built with
    tokens.bin    little-endian uint16, or uint32 for a vocabulary above 65536
    offsets.npy   int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]], its end token included
    mask.bin      of conversations, uint8 per token: 0 for a token that is read but not trained on

A store that a run uses is one of two in a folder, `train` and `eval` (`prepare.py`).
"""

import hashlib
import json
from array import array
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np

from ringformer.data.tokenizers.base import Tokenizer

FORMAT = 2


class TokenStore:
    """A store opened for reading; nothing but store.json is in memory until it is asked for.

    Attributes:
      tokens: uint16 or uint32 [N], memory-mapped.
      offsets: int64 [documents + 1], memory-mapped.
      mask: uint8 [N], memory-mapped, or None: all tokens are trained on.
      meta: the contents of store.json.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.meta: dict[str, Any] = json.loads((self.path / "store.json").read_text())
        except FileNotFoundError:
            what = "an unfinished token store (no store.json)" if self.path.is_dir() else "no token store"
            raise FileNotFoundError(f"there is {what} at {self.path}; build one with ringformer data prepare") from None
        if self.meta["format"] != FORMAT:
            raise ValueError(f"{self.path} has store format {self.meta['format']}, this version reads {FORMAT}")
        self.tokens = self._map("tokens.bin", np.dtype(self.meta["dtype"]))
        self.mask = self._map("mask.bin", np.dtype(np.uint8)) if (self.path / "mask.bin").exists() else None
        self.offsets = np.load(self.path / "offsets.npy", mmap_mode="r")
        if len(self.offsets) != self.meta["documents"] + 1 or self.offsets[-1] != len(self.tokens):
            raise ValueError(
                f"{self.path}/offsets.npy ends {len(self.offsets) - 1} documents at token {self.offsets[-1]}, "
                f"store.json says {self.meta['documents']} and {self.meta['tokens']}; delete the store and rebuild it"
            )

    def _map(self, file: str, dtype: np.dtype) -> np.ndarray:
        size, expected = (self.path / file).stat().st_size, self.meta["tokens"] * dtype.itemsize
        if size != expected:
            raise ValueError(
                f"{self.path}/{file} has {size} bytes, store.json says {expected}; delete the store and rebuild it"
            )
        return np.memmap(self.path / file, dtype, mode="r")


class StoreWriter:
    """Writes one store, document by document; `finish` writes store.json, without which it is no store.

    The fingerprint is of the documents in their order, the tokenizer, and `fingerprinted`: the settings that decide
    which tokens a document becomes.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, fingerprinted: dict[str, Any]):
        folder.mkdir()
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._tokens = (folder / "tokens.bin").open("wb")
        self._mask: BufferedWriter | None = None
        self._offsets = array("q", [0])
        self._utf8_bytes = 0
        self._trained = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._hash.update(json.dumps([FORMAT, tokenizer.name, fingerprinted], sort_keys=True).encode())

    @property
    def documents(self) -> int:
        return len(self._offsets) - 1

    def add(self, ids: np.ndarray, trained: np.ndarray | None, utf8_bytes: int, digest: bytes) -> None:
        """Write one document.

        Args:
          ids: its tokens, the end token included.
          trained: bool, which of them are trained on; None: all. Every document of a store has one, or none has.
          utf8_bytes: the size of the text that is trained on.
          digest: what identifies the document.
        """
        self._tokens.write(ids.astype(self._dtype).tobytes())
        if trained is not None:
            if self._mask is None:
                self._mask = (self._folder / "mask.bin").open("wb")
            self._mask.write(trained.astype(np.uint8).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))
        self._trained += len(ids) if trained is None else int(np.count_nonzero(trained))
        self._utf8_bytes += utf8_bytes
        self._hash.update(digest)

    def close(self) -> None:
        self._tokens.close()
        if self._mask is not None:
            self._mask.close()

    def finish(self, *, skipped_empty: int, settings: dict[str, Any]) -> None:
        """Write store.json. Raises ValueError for a mask that trains on nothing or everything."""
        self.close()
        tokens = self._offsets[-1]
        if self._mask is not None and self._trained in (0, tokens):
            what = "none" if self._trained == 0 else "all"
            raise ValueError(
                f"of the {tokens} tokens of the {self._folder.name} store's conversations {what} would be trained on, "
                "where it should be the answers and their end tokens: look at the chat template, the roles, and "
                "chat_length"
            )
        np.save(self._folder / "offsets.npy", np.frombuffer(self._offsets, np.int64))
        meta = {
            "format": FORMAT,
            "fingerprint": self._hash.hexdigest(),
            "tokenizer": self._tokenizer.name,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "dtype": self._dtype.str,
            "documents": self.documents,
            "tokens": tokens,
            "trained_tokens": self._trained,
            "utf8_bytes": self._utf8_bytes,
            "skipped_empty": skipped_empty,
            "settings": settings,
        }
        (self._folder / "store.json").write_text(json.dumps(meta, indent=2) + "\n")
