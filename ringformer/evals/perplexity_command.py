"""`ringformer eval perplexity`."""

import argparse
from pathlib import Path

from ringformer.evals.commands import Run, write_outputs
from ringformer.evals.options import add_lengths, add_model_options, opened, out_folder, say


def add_perplexity(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval perplexity`."""
    parser.description = (
        "The loss on the documents of a token store: of the same last tokens given more and more of their document as "
        "context, and at the longest context by position, in powers of two. In nats per token and in bits per byte."
    )
    add_model_options(parser)
    add_lengths(parser, required=True)
    parser.add_argument("--store", required=True, help="a token store, or a folder of stores, whose eval/ is preferred")
    parser.add_argument(
        "--documents", type=int, default=32, help="number of documents, each at least as long as the longest context"
    )
    parser.add_argument(
        "--last",
        type=int,
        metavar="TOKENS",
        help="number of last tokens to compare; default: half of the shortest context",
    )
    return _perplexity


def _perplexity(args: argparse.Namespace) -> None:
    from ringformer.data.stores.folder import open_one
    from ringformer.evals import perplexity
    from ringformer.evals.case_file import CaseFile
    from ringformer.evals.figures import draw_losses
    from ringformer.evals.model_folder import check_lengths
    from ringformer.evals.tables import perplexity_tables

    if args.documents < 1:
        raise ValueError(f"--documents={args.documents} must be at least 1")
    store = open_one(args.store, ("eval", "train"))
    last = min(args.lengths) // 2 if args.last is None else args.last
    with opened(args) as model:
        check_lengths(args.lengths, model.text.context, allow_longer=args.allow_longer)
        if store.meta["tokenizer"] != (name := model.text.tokenizer.name):
            raise ValueError(
                f"{store.path} was made with tokenizer {store.meta['tokenizer']}, but the model has {name}"
            )
        perplexity.check(store, args.lengths, last)
        settings = model.settings | {
            "store": store.meta["fingerprint"],
            "documents": args.documents,
            "last": last,
            "ends_at": max(args.lengths),
        }
        with out_folder(args, "perplexity") as folder:
            file = CaseFile(folder / "cases.jsonl", "perplexity", settings, perplexity.check_row)
            generator = model.load(max(args.lengths)).generator
            perplexity.measure_store(
                generator,
                store,
                args.lengths,
                last=last,
                documents=args.documents,
                batch_size=args.batch_size,
                file=file,
                say=say,
            )
            store.check.wait(say)
            rows = list(file.rows.values())
            bytes_per_token = store.meta["utf8_bytes"] / store.meta["trained_tokens"]
            losses = perplexity.by_context(rows, bytes_per_token), perplexity.by_position(rows, bytes_per_token)
            title = f"perplexity: {Path(args.run).resolve().name}, step {settings['step'] or 0}, on {store.path}"
            write_outputs(folder, "perplexity", f"{title}\n{perplexity_tables(*losses, last)}")
            draw_losses(*losses, title, path=folder / "perplexity.png")
