"""Token store: a folder with the concatenated tokens of many documents; any stretch of tokens can be read.

    store.json    format version, fingerprint, counts, settings of the build, hashes of the other files and of itself
                  (`integrity.py`)
    tokens.bin    little-endian uint16, or uint32 for a vocabulary above 65536
    offsets.npy   int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]], with the tokens that begin
                  and end it
    mask.bin      for conversations, uint8 per token: 0 for a token that is read but not trained on
    names.jsonl   for documents that are files, the path of each, as JSON; the manifest of the folder has its hash,
                  because the same documents elsewhere are the same store

A run has two stores in one folder, `train` and `eval` (`folder.py`).
"""

import hashlib
import io
import json
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ringformer.data.stores.checked_array import REBUILD, CheckedArray
from ringformer.data.stores.integrity import FORMAT, ContentCheck, check_files, read_meta, verified
from ringformer.data.tokenizers.base import Tokenizer
from ringformer.files.hashes import hash_object
from ringformer.files.json_text import parse_json

NAMES = "names.jsonl"
FINGERPRINTED_FORMAT = 2
"""Format version in fingerprints; since this version, the same documents have the same tokens in the same order."""


class TokenStore:
    """A store opened for reading; its tokens are read from disk on demand.

    Raises ValueError if its files have changed since they were written; for a large store, `check` reports changes
    later.

    Attributes:
      check: comparison of its files with their hashes.
      tokens: uint16 or uint32 [N], a `CheckedArray`: reading raises DamagedStore for content that has changed.
      offsets: int64 [documents + 1], in memory.
      mask: uint8 [N], a `CheckedArray`; None if all tokens are trained on.
      meta: the contents of store.json.
      has_documents: True for documents, False for conversations and rows of tokens.
      begins_documents: True if the documents were prepared with a BOS token before each.
      begun: number of documents that begin with the tokenizer's BOS token; None for a store of an earlier version.
    """

    def __init__(self, path: str | Path):
        self.path: Path = Path(path)
        try:
            self.meta: dict[str, Any] = read_meta(self.path / "store.json")
        except FileNotFoundError:
            what = "no token store"
            if self.path.is_dir():
                what = "an unfinished token store (no store.json)"
            raise FileNotFoundError(f"there is {what} at {self.path}; build one with ringformer data prepare") from None
        settings = self.meta["settings"]
        self.has_documents: bool = settings.get("format", "documents") == "documents"
        self.begins_documents: bool = bool(settings.get("begin"))
        self.begun: int | None = self.meta.get("begun")
        files = self.meta["files"]
        if "mask.bin" not in files and (self.path / "mask.bin").exists():
            raise ValueError(f"{self.path}/mask.bin does not belong to the store, which has no mask: {REBUILD}")
        check_files(self.path, files, read=lambda name: False)
        self.offsets: np.ndarray = np.load(io.BytesIO(verified(self.path / "offsets.npy", files["offsets.npy"][1])))
        self.tokens: CheckedArray = CheckedArray(self.path / "tokens.bin", np.dtype(self.meta["dtype"]))
        self.mask: CheckedArray | None = None
        hashes = {self.tokens: files["tokens.bin"][1]}
        if "mask.bin" in files:
            self.mask = CheckedArray(self.path / "mask.bin", np.dtype(np.uint8))
            hashes[self.mask] = files["mask.bin"][1]
        self.check: ContentCheck = ContentCheck(self.path, hashes)

    def names(self) -> list[str]:
        """Read the paths of the documents; empty if they are not files, or the store is of an earlier version."""
        path = self.path / NAMES
        if not path.is_file():
            return []
        return [parse_json(line) for line in path.read_bytes().splitlines()]

    def check_ids(self, vocab_size: int) -> None:
        """Raise ValueError if the store has ids beyond a model's vocabulary of `vocab_size` rows."""
        if self.meta["largest_id"] >= vocab_size:
            raise ValueError(
                f"{self.path} has the token id {self.meta['largest_id']}, beyond the model's vocabulary of "
                f"{vocab_size}; give the model at least vocab_size={self.meta['largest_id'] + 1}"
            )


class StoreWriter:
    """Writer of one store, document by document; `finish` writes store.json, which completes it.

    The fingerprint covers the documents in order, the tokenizer, and `fingerprinted`, the settings that decide the
    tokens of a document.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, fingerprinted: dict[str, Any]):
        folder.mkdir()
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._tokens = HashedFile(folder / "tokens.bin")
        self._mask: HashedFile | None = None
        self._names: HashedFile | None = None
        self._offsets = array("q", [0])
        self._utf8_bytes = 0
        self._trained = 0
        self._largest_id = 0
        self._begun = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._hash.update(json.dumps([FINGERPRINTED_FORMAT, tokenizer.name, fingerprinted], sort_keys=True).encode())

    @property
    def documents(self) -> int:
        return len(self._offsets) - 1

    def add(self, ids: np.ndarray, trained: np.ndarray | None, utf8_bytes: int, digest: bytes, name: str = "") -> None:
        """Write one document.

        Args:
          ids: the tokens of the document, including the end token.
          trained: mask of the tokens that are trained on, bool; None if all are. Either all documents of a store have a
            mask, or none has.
          utf8_bytes: size of the text that is trained on.
          digest: identifier of the document.
          name: path of the file that the document is. Either all documents of a store have one, or none has.

        Raises:
          ValueError: for an id that the tokenizer's vocabulary does not have.
        """
        if len(ids):
            least = int(ids.min())
            largest = int(ids.max())
            if least < 0 or largest >= self._tokenizer.vocab_size:
                outside = least if least < 0 else largest
                raise ValueError(
                    f"tokenizer {self._tokenizer.name} made the id {outside} of "
                    f"document {self.documents}; its vocabulary has {self._tokenizer.vocab_size}"
                )
            self._largest_id = max(self._largest_id, largest)
            self._begun += int(ids[0]) == self._tokenizer.bos_id
        self._tokens.write(ids.astype(self._dtype).tobytes())
        if trained is not None:
            if self._mask is None:
                self._mask = HashedFile(self._folder / "mask.bin")
            self._mask.write(trained.astype(np.uint8).tobytes())
        if name:
            if self._names is None:
                self._names = HashedFile(self._folder / NAMES)
            self._names.write(f"{json.dumps(name)}\n".encode())
        self._offsets.append(self._offsets[-1] + len(ids))
        self._trained += len(ids) if trained is None else int(np.count_nonzero(trained))
        self._utf8_bytes += utf8_bytes
        self._hash.update(digest)

    def close(self) -> None:
        with ExitStack() as stack:  # closes all, also if the disk is full
            for file in (self._tokens, self._mask, self._names):
                if file is not None:
                    stack.callback(file.close)

    def finish(self, *, skipped_empty: int, settings: dict[str, Any]) -> None:
        """Write store.json. Raises ValueError for a mask that trains on nothing or everything."""
        self.close()
        tokens = self._offsets[-1]
        if self._mask is not None and self._trained == tokens and settings.get("format") == "tokens":
            (self._folder / self._mask.name).unlink()  # labels that are all tokens
            self._mask = None
        if self._mask is not None and self._trained in (0, tokens):
            what = "all" if self._trained else "none"
            of = f"{self._folder.name} store's"
            what_of = "conversations"
            reason = "instead of the answers and their end tokens: check the chat template, the roles, and chat_length"
            if settings.get("format") == "tokens":
                what_of = "rows"
                reason = "because of the labels or masks of its rows"
            raise ValueError(f"{what} of the {tokens} tokens of the {of} {what_of} would be trained on, {reason}")
        np.save(saved := io.BytesIO(), np.frombuffer(self._offsets, np.int64))
        offsets = HashedFile(self._folder / "offsets.npy")
        offsets.write(saved.getbuffer())
        offsets.close()
        meta = {
            "format": FORMAT,
            "fingerprint": self._hash.hexdigest(),
            "tokenizer": self._tokenizer.name,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "dtype": self._dtype.str,
            "documents": self.documents,
            "begun": self._begun,
            "tokens": tokens,
            "largest_id": self._largest_id,
            "trained_tokens": self._trained,
            "utf8_bytes": self._utf8_bytes,
            "skipped_empty": skipped_empty,
            "settings": settings,
            "files": {file.name: [file.size, file.hash] for file in (self._tokens, offsets, self._mask) if file},
        }
        content = json.dumps(meta | {"checksum": hash_object(meta)}, indent=2)
        (self._folder / "store.json").write_text(content + "\n")


class HashedFile:
    """File that is written once, together with the xxh3_128 of the content that was passed to it."""

    def __init__(self, path: Path):
        self.name: str = path.name
        self.size: int = 0
        self._file = path.open("wb")
        self._hash = xxhash.xxh3_128()

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()

    def write(self, content: bytes | memoryview) -> None:
        self.size += self._file.write(content)
        self._hash.update(content)

    def close(self) -> None:
        self._file.close()
