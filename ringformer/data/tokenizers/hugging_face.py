"""Hugging Face `tokenizer.json` files, read with the `tokenizers` library.

The library turns a special token's name into that token wherever it appears in a text. Text is therefore encoded by a
copy of the tokenizer in which each special token has a private name that no text contains. Chat templates use these
names, so that a conversation is still encoded in one call. The copy lacks the file's post-processor, which would add
tokens and trim whitespace from offsets.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ringformer.data.optional_packages import needed_for
from ringformer.data.tokenizers.base import Segment, Tokenizer, existing_file, read_config
from ringformer.data.tokenizers.long_texts import Tokens, encode_long
from ringformer.data.tokenizers.special_tokens import SpecialNames, end_ids, special_names
from ringformer.data.tokenizers.token_bytes import (
    TokenBytes,
    byte_level_bytes,
    join_pieces,
    metaspace_bytes,
    trained_tokens,
)
from ringformer.files.json_text import parse_json

END_TOKENS = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")
BEGIN_TOKENS = ("<|begin_of_text|>", "<s>", "<bos>")
"""Default names of the tokens that end and begin a text, used if no file beside the tokenizer names these tokens."""

LONG_TEXT = 2**19
"""Most characters of a text that is encoded in one piece; longer texts are encoded in windows, in bounded memory."""

MOST_TOKENS = 2**24
"""Most tokens of a vocabulary; the largest ones have a quarter of a million."""
PANIC = "PanicException"
"""Class of a panic of the library's Rust code, which is private."""

SWITCHES = "single_word", "lstrip", "rstrip", "normalized"
"""Switches of an added token in a tokenizer.json, all off for a token that its vocabulary has."""

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_NONCE = secrets.token_hex(8)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; files beside it name `eos_token` and `bos_token` (`special_tokens.py`)."""

    def __init__(self, path: str | Path):
        with needed_for("a tokenizer.json"):
            import tokenizers

        path = existing_file(path)
        try:
            source = path.read_text(encoding="utf-8")
            description = parse_json(source)
            self._original = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library raises no narrower class
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
        self.config: Mapping[str, Any]
        self.files: Sequence[Path]
        self.config, self.files = read_config(path)
        flagged = _flagged(description, special_names(self.config))
        changed = flagged["added_tokens"] != (description.get("added_tokens") or [])
        if changed:
            self._original = tokenizers.Tokenizer.from_str(json.dumps(flagged))
        special = [token for token in flagged["added_tokens"] if token["special"]]
        self.controls: Mapping[str, int] = {token["content"]: token["id"] for token in special}
        self._unigram = type(self._original.model).__name__ == "Unigram"
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(_with_private_names(flagged, special)))
        self._original.no_padding()  # up to any length, for which there may be no memory
        self.vocab_size: int = max(self._original.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._check_ids(path)
        self._token_bytes = _token_bytes(self._encoder, description, self.vocab_size)
        self.byte_lengths: np.ndarray = self._token_bytes.lengths(self.controls.values())
        self.bos_id: int | None = self._named("bos_token", BEGIN_TOKENS, path)
        # The post-processor decides this, not add_bos_token in tokenizer_config.json: GPT-2 names a token but does not
        # add it.
        first = _reported(path, lambda: self._original.encode("").ids[:1])
        self.begins: bool = self.bos_id is not None and first == [self.bos_id]
        self.eos_id: int = self._eos_id(path)
        content = hashlib.blake2b(source.encode(), digest_size=8, key=str(self.eos_id).encode())
        if changed:
            content.update(json.dumps(flagged["added_tokens"]).encode())
        self.name: str = "tokenizer.json-" + content.hexdigest()

    def _check_ids(self, path: Path) -> None:
        """Raise ValueError for more tokens than MOST_TOKENS, and for a special token whose id is not the one that the
        library gives it."""
        if not 1 <= self.vocab_size <= MOST_TOKENS:
            raise ValueError(
                f"{path} has {self.vocab_size - 1:,} as its largest id, it must be 0 to {MOST_TOKENS - 1:,}: models "
                "have a row for each id"
            )
        for name, i in self.controls.items():
            actual = self._original.token_to_id(name)
            if actual != i:
                raise ValueError(
                    f"{path} gives {name!r} the id {i}, which the library reads as {actual}: correct the id"
                )

    def _named(self, key: str, usual: tuple[str, ...], path: Path) -> int | None:
        """Return the id of the token that the files beside `path` name; of one of the `usual` names if they name none,
        and None if there is none of these."""
        token = self.config.get(key)
        if token is None:
            for name in usual:
                if name in self.controls:
                    return self.controls[name]
            return None
        if token not in tuple(self.controls):
            folder = str(path.parent)
            advice = ""
            if type(token) is str and self._original.token_to_id(token) is None:
                advice = (
                    f", or add the token as transformers does: AutoTokenizer.from_pretrained({folder!r})"
                    f".save_pretrained({folder!r})"
                )
            raise ValueError(
                f"{key} {token!r}, which a file beside {path} names, is not a special token of it: name one of "
                f"{', '.join(self.controls) or 'its tokens'} in tokenizer_config.json{advice}"
            )
        return self.controls[token]

    def _eos_id(self, path: Path) -> int:
        """Return the id of the token that ends a document. Raises ValueError if no file names it and either no special
        token has a usual name, or config.json has other ids."""
        eos_id = self._named("eos_token", END_TOKENS, path)
        ends: list[Any] = []
        if self.config.get("eos_token") is None:
            ends = end_ids(path.parent)
        if eos_id is not None and (not ends or eos_id in ends):
            return eos_id
        hint = ""
        named = [repr(name) for name, i in self.controls.items() if i in ends]
        if named:
            hint = f" (in config.json, {' and '.join(named)})"
        raise ValueError(
            f"{path} does not define which token ends a document{hint}; set eos_token in a tokenizer_config.json "
            f"beside it. Special tokens: {', '.join(self.controls) or 'none'}"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        usual = [text for text in texts if len(text) <= LONG_TEXT]
        try:
            encode = partial(self._encoder.encode_batch_fast, usual, add_special_tokens=False)
            encodings = iter(_reported(self.name, encode))
            encoded = []
            for text in texts:
                if len(text) > LONG_TEXT:
                    encoded.append(self._long(text, lambda tokens: tokens.ids))
                else:
                    encoded.append(np.fromiter(next(encodings).ids, np.int32))
            return encoded
        except TypeError:
            for text in texts:
                text.encode()  # raises UnicodeEncodeError for a lone surrogate
            raise

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        texts = [join_pieces(self._token_bytes.pieces(chat)).decode() for chat in chats]
        return self._token_bytes.with_masks(chats, self.encode_batch(texts), self._by_offsets)

    def _by_offsets(self, chat: Sequence[Segment]) -> np.ndarray:
        in_bytes = self._token_bytes.pieces(chat)
        text = join_pieces(in_bytes).decode()
        pieces = [(piece.decode(), trained) for piece, trained in in_bytes]
        spans = self._long(text, lambda tokens: np.stack([tokens.starts, tokens.ends], 1))
        starts, ends = spans.T
        return trained_tokens(starts, ends, pieces)

    def _long(self, text: str, part: Callable[[Tokens], np.ndarray]) -> np.ndarray:
        def encode(texts: list[str]) -> list[Any]:
            return _reported(self.name, lambda: self._encoder.encode_batch(texts, add_special_tokens=False))

        return encode_long(encode, text, part, whole_words=self._unigram)

    def decode(self, ids: Iterable[int]) -> str:
        return self._original.decode(list(map(int, ids)), skip_special_tokens=True)


def _reported(name: object, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which encodes texts with the tokenizer `name`.

    Raises TypeError for a text with a lone surrogate, and ValueError for any other error of the library. A panic of its
    Rust code, as of a regular expression that takes too many steps, is no Exception.
    """
    try:
        return work()
    except TypeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise ValueError(
            f"tokenizer {name} cannot encode a text: {error}; choose another tokenizer, or correct the file"
        ) from None


def _flagged(description: dict[str, Any], named: SpecialNames) -> dict[str, Any]:
    """Return a tokenizer.json whose `added_tokens` flag the special tokens that the files beside it name. A token that
    ends or begins a text may be in the vocabulary of the model alone, unless text is made of it."""
    added = []
    present = set()
    for token in description.get("added_tokens") or ():
        name = token["content"]
        present.add(name)
        added.append(token | {"special": token["special"] or name in named.special})
    model = description["model"]
    pieces = model["vocab"]
    if not isinstance(pieces, dict):
        pieces = {piece: i for i, (piece, *_) in enumerate(pieces)}
    for name in sorted(named.bounds - present):
        if name in pieces and not _in_text(name, model):
            added.append({"id": pieces[name], "content": name, "special": True} | dict.fromkeys(SWITCHES, False))
    return description | {"added_tokens": added}


def _in_text(piece: str, model: dict[str, Any]) -> bool:
    """Return True if a BPE makes `piece` of text, or other pieces of it."""
    if "merges" not in model:
        return False
    if len(piece) == 1:
        return True
    for merge in model["merges"]:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if piece in parts or piece == "".join(parts):
            return True
    return False


def _with_private_names(description: dict[str, Any], special: list[dict[str, Any]]) -> dict[str, Any]:
    """Rename the special tokens of a tokenizer.json. The new names differ in every process and stand between
    noncharacters."""
    names = {token["content"]: f"\ufdd0{_NONCE}:{token['id']}\ufdd1" for token in special}
    added = []
    for token in description.get("added_tokens") or ():
        if token["special"]:
            token = token | {"content": names[token["content"]], "normalized": False, "single_word": False}
        added.append(token)
    model = dict(description["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    unused = dict.fromkeys(("truncation", "padding", "post_processor"))
    return description | unused | {"added_tokens": added, "model": model}


def _token_bytes(encoder, description: dict[str, Any], vocab_size: int) -> TokenBytes:
    """Return the bytes of the encoder's tokens, decoded from GPT-2's or SentencePiece's notation."""
    byte_level = "ByteLevel" in json.dumps([description.get("pre_tokenizer"), description.get("decoder")])
    byte_fallback = bool(description["model"].get("byte_fallback"))
    tokens = [b""] * vocab_size
    for piece, i in encoder.get_vocab(with_added_tokens=False).items():
        if byte_level:
            tokens[i] = byte_level_bytes(piece) or b""
        else:
            tokens[i] = metaspace_bytes(piece, is_byte=byte_fallback and bool(_BYTE_PIECE.fullmatch(piece)))
    for i, token in encoder.get_added_tokens_decoder().items():
        tokens[i] = token.content.encode()
    return TokenBytes(tokens)
