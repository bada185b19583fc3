"""Inspection of a store: print decoded documents, with trained tokens in colour."""

import itertools

import numpy as np
from rich.console import Console
from rich.text import Text

from ringformer.cli.visible_text import visible
from ringformer.data.stores.token_store import TokenStore
from ringformer.data.tokenizers.base import Tokenizer

SHOWN = 2000
"""Most tokens of a document to show."""


def show_samples(store: TokenStore, tokenizer: Tokenizer, samples: int, console: Console) -> None:
    """Print `samples` documents spread over the store, and its share of masked tokens.

    Raises:
      ValueError: if the store was made with another tokenizer.
    """
    if tokenizer.name != store.meta["tokenizer"]:
        raise ValueError(
            f"{store.path} was made with tokenizer {store.meta['tokenizer']}, not {tokenizer.name}: set --tokenizer to "
            "the right one"
        )
    documents = len(store.offsets) - 1
    names = store.names()
    chosen = np.unique(np.linspace(0, documents - 1, min(samples, documents)).astype(int))
    for i in chosen:
        start, end = store.offsets[i : i + 2].tolist()
        trained = np.ones(end - start, bool)
        if store.mask is not None:
            trained = np.asarray(store.mask[start:end]) != 0
        share = 1 - trained.mean()
        console.rule(f"document {i}: {end - start:,} tokens, {share:.1%} masked")
        if names:
            console.print(Text(visible(names[i]), style="italic"))
        console.print(_coloured(np.asarray(store.tokens[start : min(end, start + SHOWN)]), trained[:SHOWN], tokenizer))
        if end - start > SHOWN:
            console.print(Text(f"... {end - start - SHOWN:,} more tokens", style="italic"))
    console.rule(f"{documents:,} documents")
    masked = 1 - store.meta["trained_tokens"] / store.meta["tokens"]
    colours = ("trained", "green"), ", ", ("masked", "dim"), ", ", ("control token", "reverse")
    legend = Text.assemble(f"{masked:.1%} of {store.meta['tokens']:,} tokens masked; colours: ", *colours)
    console.print(legend)
    store.check.raise_if_failed()
    if store.check.pending:
        console.print(Text("the store's contents are not fully verified yet", style="italic"))


def _coloured(ids: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer) -> Text:
    names = {i: name for name, i in tokenizer.controls.items()}
    kinds = list(zip(trained.tolist(), map(names.__contains__, ids.tolist()), strict=True))
    text = Text()
    for (is_trained, is_control), run in itertools.groupby(range(len(ids)), kinds.__getitem__):
        style = "green" if is_trained else "dim"
        places = list(run)
        if is_control:
            for i in places:
                text.append(visible(names[int(ids[i])]), f"{style} reverse")
            continue
        # Decode the run together with everything before it: decoded alone, it could lose its leading space.
        before = tokenizer.decode(ids[: places[0]])
        text.append(visible(tokenizer.decode(ids[: places[-1] + 1])[len(before) :]), style)
    return text
