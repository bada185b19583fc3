"""Translation of a Hugging Face config.json to the configuration of a family and back."""

import reprlib
from collections.abc import Iterable
from typing import Any

from ringformer.checkpoints.rope_change import RopeChange
from ringformer.convert.mechanisms import mechanisms
from ringformer.data.tokenizers.special_tokens import MODEL_IDS, context_of, text_keys
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.families.huggingface import check_numbers
from ringformer.models.own_attention import REGISTERED
from ringformer.models.registry import FAMILIES, Family, hugging_face_of
from ringformer.settings import LARGEST

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
"""Field of `DecoderConfig` for each key that a config.json must have."""

MORE_SIZES = "num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings"
"""Keys that are whole numbers of at least 1, too, if a config.json has them."""

OPTIONAL_FIELDS: dict[str, tuple[str, Any]] = {
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", False),
}
"""Field of `DecoderConfig` and transformers' usual default for each key."""

OUTER = (
    "quantization_config",
    "tie_word_embeddings",
    *MODEL_IDS,
    "dtype",
    "torch_dtype",
)
"""Keys that a vision model decides for its text model."""

REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (None, 1, 1.0), "quantization_config": (None,)}
"""Values of a config.json that every family implements; each adds its own (`HuggingFace.required`)."""

NUMBERS = (
    "rms_norm_eps",
    "initializer_range",
    "rope_theta",
)

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")
"""Keys of a config.json that determine the rope, with the context."""

NULLABLE = (
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "original_max_position_embeddings",
    "rope_scaling",
    "rope_parameters",
)
"""Keys for which null means absent."""


def from_hf_config(hf: dict[str, Any]) -> DecoderConfig:
    """Return the configuration of a config.json, as transformers 4 or 5 writes it.

    Raises ValueError that names the features that the model's family does not support in ringformer.
    """
    hf, family = text_config(hf)
    table = family.hugging_face
    assert table is not None, "text_config finds families that can be converted"
    required = REQUIRED_VALUES | dict(table.required)
    for key, supported in required.items():
        if hf.get(key, supported[0]) not in supported:
            raise ValueError(f"config.json has {key}={hf[key]!r}: only {supported[0]!r} can be converted")
    missing = [key for key in SIZES if key not in hf]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    hf = {key: value for key, value in hf.items() if value is not None or key not in NULLABLE}
    for key in (*SIZES, *MORE_SIZES):
        if key in hf and not (type(hf[key]) is int and 1 <= hf[key] <= LARGEST):
            raise ValueError(
                f"config.json has {key}={reprlib.repr(hf[key])}, must be a whole number of at least 1, and at most "
                f"{LARGEST:,}"
            )
    check_numbers(_present(hf, NUMBERS))
    tied = hf.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise ValueError(f"config.json has tie_word_embeddings={tied!r}, must be true or false")
    fields: dict[str, Any] = {}
    for key, field in SIZES.items():
        fields[field] = hf[key]
    for key, (field, default) in OPTIONAL_FIELDS.items():
        fields[field] = hf.get(key, default)
    heads = hf["num_attention_heads"]
    return family.config(
        **fields,
        num_kv_heads=hf.get("num_key_value_heads", heads),
        head_dim=hf.get("head_dim", hf["hidden_size"] // heads),
        **table.read(hf),
    )


def _present(values: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of those of the keys that there are, in the order of `keys`."""
    return {key: values[key] for key in keys if key in values}


def with_rope(hf: dict[str, Any], change: RopeChange) -> dict[str, Any]:
    """Return the config.json of a text model with another rope, and with the context that its scaling reaches.

    Raises ValueError as `RopeChange.apply` does.
    """
    keys, family = text_config(hf)
    table = family.hugging_face
    assert table is not None, "text_config finds families that can be converted"
    if change.drop_rope:
        from_hf_config(hf)  # refuses what it could not convert with its rope
        return _without_rope(keys, family)
    context = context_of(keys)
    config = from_hf_config(hf)
    written = table.write(change.apply(config, context))
    kept = {key: value for key, value in hf.items() if key not in ROPE_KEYS}
    result = kept | _present(written, ROPE_KEYS)
    reached = change.context(config, context)
    if reached is not None and reached > (context_of({**table.absent, **result}) or 0):
        result["max_position_embeddings"] = reached
    return result


def _without_rope(keys: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the config.json of a LLaMA or a SmolLM3 whose layers have no positions, which is that of a SmolLM3. Raises
    ValueError for another family: it has no such form in transformers.

    Args:
      keys: the model's config.json, of which absent keys have the defaults of its own family.
    """
    smollm3 = FAMILIES["smollm3"]
    if family not in (FAMILIES["llama"], smollm3):
        raise ValueError(
            f"drop_rope for {keys.get('model_type')}: only llama and smollm3 have a form without positions"
        )
    table = smollm3.hugging_face
    assert table is not None, "it can be converted"
    of_family = {"num_key_value_heads": keys["num_attention_heads"], "tie_word_embeddings": False}
    without = {"no_rope_layers": [0] * keys["num_hidden_layers"], "use_sliding_window": False}
    return of_family | keys | {"architectures": [table.architecture], "model_type": table.model_type} | without


def text_config(hf: dict[str, Any]) -> tuple[dict[str, Any], Family]:
    """Return the config.json of the text model, which a vision model wraps in its own, and the model's family. Absent
    keys have the defaults of transformers.

    A vision model may contain models of several families: the text model's own type chooses among them, and if it has
    none, the first. Raises ValueError for a family that ringformer does not have; the message names what it lacks.
    """
    tables = [(family.hugging_face, family) for family in FAMILIES.values() if family.hugging_face]
    architectures = hf.get("architectures")
    if architectures in (None, []):  # as transformers writes a configuration alone
        if "model_type" not in hf:
            raise ValueError("config.json has neither architectures nor a model_type: which model is it?")
        by_type = {table.model_type: table.architecture for table, _ in tables}
        architectures = [by_type.get(hf["model_type"], hf["model_type"])]
    listed = type(architectures) is list
    name = architectures[0] if listed and len(architectures) == 1 else None

    text = hf
    where = "config.json"
    possible = []
    wrappers = []
    for table, family in tables:
        if table.architecture == name:
            possible.append((table, family))
        if name is not None and table.wrapper == name:
            wrappers.append((table, family))
    if wrappers and type(hf.get("text_config")) is dict:
        text = text_keys(hf, OUTER)
        where = f"the text_config of this {name}"
        possible = wrappers
    for table, family in possible:
        if text.get("model_type", table.model_type) == table.model_type:
            return {**table.absent, **text}, family
    if possible:
        types = " or ".join(repr(table.model_type) for table, _ in possible)
        raise ValueError(f"{where} has model_type={text['model_type']!r}: only {types} can be converted as {name}")

    classes = ", ".join(table.architecture for table, _ in tables)
    named = ", ".join(map(str, architectures)) if listed else repr(architectures)
    if lacking := mechanisms(hf):
        named += f", with {lacking}"
    raise ValueError(
        f"the model is a {named}: ringformer has no such family. It converts {classes} (docs/models.md); "
        "docs/how-to/another-model.md says how to add one"
    )


KEPT = ("dual_chunk_attention_config",)
"""Keys of a config.json that other programs use, and ringformer and transformers do not: exports keep them."""

QUIET = ("transformers_version", "_name_or_path", "use_cache", "architectures", "model_type", "unk_token_id")
"""Keys that exports leave out without a word, or write anew."""


def left_out(hf: dict[str, Any], exported: dict[str, Any]) -> list[str]:
    """Return the keys of an imported config.json that its export lacks, and that are set to something."""
    return sorted(key for key, value in hf.items() if value and key not in exported and key not in QUIET)


def text_model_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model alone: `hf` itself unless it is that of a vision model."""
    if "text_config" not in hf:
        return hf
    keys, family = text_config(hf)
    assert family.hugging_face is not None, "text_config finds families that can be converted"
    return {"architectures": [family.hugging_face.architecture], **keys}


def to_hf_config(config: DecoderConfig, *, max_position: int, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model, for transformers 4 and 5.

    Version 5 reads `rope_parameters`. Version 4 reads `rope_theta` and `rope_scaling`, which version 5 also accepts.
    The result has all three.

    Args:
      max_position: context of the model in tokens.
      token_ids: bos_token_id, eos_token_id, pad_token_id.
    """
    table = hugging_face_of(type(config))
    if table is None:
        raise ValueError(
            f"the model is a {type(config).__name__}: only the families of ringformer can be exported, and those "
            "derived from them that change nothing"
        )
    if config.attention in REGISTERED:
        raise ValueError(
            f"the model has attention {config.attention!r}, which transformers' {table.architecture} has not: it "
            "cannot be exported"
        )
    own = table.write(config)
    if config.window and not own.get("sliding_window"):
        raise ValueError(
            f"window={config.window}: transformers' {table.architecture} has no sliding window for all layers, so it "
            "cannot be exported"
        )
    if config.hidden_size % config.num_heads and "head_dim" not in table.defaults:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not a multiple of num_heads={config.num_heads}: transformers refuses "
            f"such a {table.model_type}"
        )
    hf: dict[str, Any] = {"architectures": [table.architecture], "model_type": table.model_type}
    for key, field in SIZES.items():
        hf[key] = getattr(config, field)
    hf["num_key_value_heads"] = config.num_kv_heads
    hf["head_dim"] = config.head_dim
    for key, values in table.required.items():
        if values[0] is not None:
            hf[key] = values[0]
    for key, (field, _) in OPTIONAL_FIELDS.items():
        hf[key] = getattr(config, field)
    hf["max_position_embeddings"] = max_position
    hf |= own
    hf |= {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    return hf | token_ids
