"""Beginning of documents: with the tokenizer's BOS token, or without one; and of the texts of a run on such stores.

Chats begin as their template writes, and rows of tokens as they are. Only documents get a token.
"""

from collections.abc import Sequence

from ringformer.data.stores.options import Begin
from ringformer.data.stores.token_store import TokenStore
from ringformer.data.tokenizers.base import Tokenizer, control_name


def begins_documents(begin: Begin, tokenizer: Tokenizer) -> bool:
    """Return True if documents get the tokenizer's BOS token. Raises ValueError if they should but there is none."""
    if begin == "tokenizer":
        return tokenizer.begins
    if begin == "true" and tokenizer.bos_id is None:
        message = (
            f"begin='true': tokenizer {tokenizer.name} has no BOS token: leave out --begin (for a run: "
            "config.data.begin)"
        )
        if tokenizer.files:
            message += ", or name a bos_token in the tokenizer_config.json beside the tokenizer"
        raise ValueError(message)
    return begin == "true"


def texts_begin(stores: Sequence[TokenStore], tokenizer: Tokenizer) -> bool | None:
    """Return True if the texts of a model that is trained on `stores` begin with the BOS token; None if a store of an
    earlier version, which does not record it, decides.

    Stores of documents decide. Without any, texts begin as most conversations or rows of tokens do, but never with a
    token that the tokenizer puts before no text, because it then belongs to the chat template.
    """
    deciding = [store for store in stores if store.has_documents] or stores
    begun = 0
    documents = 0
    for store in deciding:
        if store.begun is None:
            return None
        begun += store.begun
        documents += store.meta["documents"]
    if not deciding[0].has_documents and not tokenizer.begins:
        return False
    return 2 * begun > documents


def check_same_beginning(stores: Sequence[TokenStore]) -> None:
    """Raise ValueError if only some of the stores of documents begin with the BOS token: no prompt would begin as all
    of them do."""
    begun = []
    others = []
    for store in stores:
        if store.begins_documents and store.has_documents:
            begun.append(store)
        elif store.has_documents:
            others.append(store)
    if begun and others:
        raise ValueError(
            f"documents of {begun[0].path} begin with the tokenizer's BOS token, and those of {others[0].path} do not: "
            "prepare one of the stores again in another directory, with --begin=true or --begin=false"
        )


def describe_earlier(store: TokenStore, tokenizer: Tokenizer) -> str:
    """Return a line about a store of documents that an earlier version prepared without the BOS token of a tokenizer
    that begins texts with it; empty for all others."""
    if not store.has_documents or store.begun is not None or not tokenizer.begins:
        return ""
    return (
        f"{store.path}: an earlier version prepared this store, so its documents begin without "
        f"{bos_name(tokenizer)}, with which the tokenizer begins texts; prepare them again in another directory to "
        "begin with it"
    )


def bos_name(tokenizer: Tokenizer) -> str:
    """Return the name of the BOS token."""
    return control_name(tokenizer, tokenizer.bos_id) or f"the token {tokenizer.bos_id}"
