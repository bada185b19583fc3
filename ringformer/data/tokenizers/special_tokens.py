"""Special tokens of a tokenizer, and the tokens that end the texts of a model, with its context, from the JSON files of
their folder. Precedence is that of transformers:

- `tokenizer_config.json` and `special_tokens_map.json` name the tokens of a tokenizer. The map overrides the config,
  unless the config has `added_tokens_decoder`: the map is then not read. Ids in other files name no token of a
  tokenizer.
- A token that either of the two names is special, even if `tokenizer.json` has it as ordinary text.
- `generation_config.json` has the ids that end a model's texts; without that file, `config.json` has them.
- In the `config.json` of a vision model, outer ids override those of its `text_config`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.files.untrusted import contained, read_object

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"

MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the ids of special tokens in a config.json."""

KEY = "_token"
"""Last letters of a key that names a token."""


class ModelTokens(NamedTuple):
    """Facts about the texts of a model."""

    ends: frozenset[int]
    """Tokens that end a text; none if no file has them."""
    context: int | None
    """Context in tokens, beyond `max_position_embeddings` if a rope is scaled; None if no file has it."""


def token_names(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of special tokens by key, as `eos_token`. The value is None for a token that a file sets to
    null or to nothing, and what a file has if that cannot name a token.

    Args:
      config: contents of tokenizer_config.json.
      special_tokens_map: contents of special_tokens_map.json.
    """
    merged = dict(config)
    if "added_tokens_decoder" not in config:
        merged |= special_tokens_map
    named = merged.get("extra_special_tokens")
    if type(named) is dict:  # those that only one model has
        merged |= named
    names = {}
    for key, value in merged.items():
        if not key.endswith(KEY) or type(value) is bool:  # add_bos_token is a choice, no token
            continue
        described = value.get("content") if type(value) is dict else value
        if described == "":
            described = None
        names[key] = described
    return names


class SpecialNames(NamedTuple):
    """Names of the tokens that are special, whatever `tokenizer.json` flags."""

    special: frozenset[str]
    bounds: frozenset[str]
    """Names of the tokens that end and begin a text."""


def special_names(config: Mapping[str, Any]) -> SpecialNames:
    """Return the special tokens of a tokenizer_config.json with `token_names`: those that it names, and those that it
    flags in `added_tokens_decoder`."""
    special = set()
    bounds = set()
    for key, name in config.items():
        if key.endswith(KEY) and type(name) is str:
            special.add(name)
            if key in ("bos_token", "eos_token"):
                bounds.add(name)
    tokens = config.get("added_tokens_decoder")
    if type(tokens) is dict:
        for token in tokens.values():
            is_special = type(token) is dict and token.get("special") is True
            if is_special and type(token.get("content")) is str:
                special.add(token["content"])
    return SpecialNames(frozenset(special), frozenset(bounds))


def model_tokens(folder: Path, name: str, vocab_size: int, defaults: Mapping[str, Any]) -> ModelTokens:
    """Return the tokens that end the texts of a model, and its context.

    Args:
      folder: the folder with the model's files, any of which may be missing.
      name: file name of the model's Hugging Face config.json in `folder`.
      vocab_size: rows of the model's vocabulary.
      defaults: values that keys have in transformers if the config lacks them.

    Raises ValueError for an id that is no token of the vocabulary.
    """
    config = _read(folder, name)
    keys: dict[str, Any] = {}
    if config:
        keys = {**defaults, **text_keys(config)}
    with_ends = keys
    file = name
    if contained(folder, GENERATION_CONFIG).is_file():
        with_ends = _read(folder, GENERATION_CONFIG)
        file = GENERATION_CONFIG
    ends = _ids(with_ends, "eos_token_id")
    for end in ends:
        if type(end) is not int or end < 0:
            raise ValueError(f"{folder / file}: eos_token_id {end!r} is not a token id{_CORRECT}")
        if end >= vocab_size:
            raise ValueError(
                f"{folder / file}: eos_token_id {end} is beyond the model's vocabulary of {vocab_size} tokens{_CORRECT}"
            )
    return ModelTokens(frozenset(ends), context_of(keys))


_CORRECT = ": correct it; in a converted model, correct it in the Hugging Face checkpoint and convert that again"


def end_ids(folder: Path) -> list[Any]:
    """Return the ids that the config.json in `folder` has for ends of texts; [] without such a file. They are not
    checked: the file may be any config.json that lies beside a tokenizer."""
    return _ids(text_keys(_read(folder, "config.json")), "eos_token_id")


def text_keys(config: Mapping[str, Any], outer: Iterable[str] = MODEL_IDS) -> dict[str, Any]:
    """Return the keys of a text model from a config.json, which may be that of a vision model with a `text_config`.

    Args:
      outer: keys that the vision model decides for its text model, unless it has null.
    """
    inner = config.get("text_config")
    if type(inner) is not dict:
        return dict(config)
    decided = {key: config[key] for key in outer if config.get(key) is not None}
    return {**inner, **decided}


def context_of(keys: Mapping[str, Any]) -> int | None:
    """Return the context in tokens of a text model's config.json, whose absent keys have their defaults; None if it
    has none.

    A scaled rope may reach beyond `max_position_embeddings`. YaRN and LLaMA 3.1 name the original context. With a
    linear scaling, LongLoRA's LLaMA has its original context in `max_position_embeddings`, and other LLaMA the scaled
    one; nothing tells them apart, so the longer one counts. Gemma 3 has the scaled one.
    """
    context = keys.get("max_position_embeddings")
    scaling = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor") or 1
    original = scaling.get("original_max_position_embeddings")
    if kind == "linear" and keys.get("model_type") == "llama":
        original = context
    contexts = [context, (original or 0) * factor]
    return max(map(int, filter(None, contexts)), default=None)


def _ids(keys: Mapping[str, Any], key: str) -> list[Any]:
    """Return the ids of a key that may have one id, a list of ids, or null."""
    value = keys.get(key)
    if value is None:
        return []
    if type(value) is list:
        return value
    return [value]


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of the folder, empty if there is no such file."""
    if not contained(folder, name).is_file():
        return {}
    return read_object(folder, name)
