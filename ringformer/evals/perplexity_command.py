"""`ringformer eval perplexity`."""

import argparse
from dataclasses import dataclass

from ringformer.evals.commands import Run
from ringformer.evals.options import EvaluationOptions, add_options, opened, say, write_outputs


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(EvaluationOptions):
    """Options of `ringformer eval perplexity`."""

    store: str
    """Token store, or a folder of stores, whose eval/ is preferred."""
    documents: int = 32
    """Number of documents, each at least as long as the longest context."""
    last: int | None = None
    """Number of last tokens to compare; default: half of the shortest context."""


def add_perplexity(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval perplexity`."""
    parser.description = (
        "The loss on the documents of a token store: of the same last tokens given more and more of their document as "
        "context, and at the longest context by position, in powers of two. In nats per token and in bits per byte."
    )
    add_options(parser, PerplexityOptions)
    return _perplexity


def _perplexity(args: argparse.Namespace) -> None:
    from ringformer.data.stores.folder import open_one
    from ringformer.evals import perplexity
    from ringformer.evals.figures import draw_losses
    from ringformer.evals.tables import perplexity_tables

    store = open_one(args.store, ("eval", "train"))
    with opened(args) as model:
        if store.meta["tokenizer"] != (name := model.text.tokenizer.name):
            raise ValueError(
                f"{store.path} was made with tokenizer {store.meta['tokenizer']}, but the model has {name}"
            )
        lengths, longest = model.lengths, max(model.lengths)
        last = min(lengths) // 2 if args.last is None else args.last
        perplexity.check(store, lengths, last)
        settings = {"store": store.meta["fingerprint"], "documents": args.documents, "last": last, "ends_at": longest}
        with model.cases("perplexity", settings, perplexity.check_row) as file:
            token_losses = model.load(longest).generator.token_losses
            perplexity.measure_store(token_losses, store, lengths, args.documents, last, args.batch_size, file, say)
            store.check.wait(say)
            bytes_per_token = store.meta["utf8_bytes"] / store.meta["trained_tokens"]
            rows = list(file.rows.values())
            losses = perplexity.by_context(rows, bytes_per_token), perplexity.by_position(rows, bytes_per_token)
            title = f"perplexity: {model.name}, on {store.path}"
            write_outputs(file, title, perplexity_tables(*losses, last), draw_losses, *losses)
