"""The evaluations of perplexity: their settings, their stretches of documents and their outputs."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringformer.data.stores.folder import open_one
from ringformer.evals.case_file import CheckRow, Row
from ringformer.evals.evaluation_setup import Opened, opened, opened_model, say, write_outputs
from ringformer.evals.figures import draw_losses
from ringformer.evals.perplexity import by_context, sliding
from ringformer.evals.perplexity.longppl import KEY, KeyTokens, part
from ringformer.evals.perplexity.losses import (
    ALL,
    Documents,
    Loss,
    Stretch,
    TokenLosses,
    check_row,
    loss_table,
    losses_by_context,
)

Masks = Mapping[str, np.ndarray]
"""Masks of the tokens of a stretch but the first, bool [T - 1], by the name of the part."""


class Evaluation(NamedTuple):
    """One of the evaluations, for a model and documents."""

    name: str
    title: str
    settings: dict[str, Any]
    """Settings that determine an outcome, besides the model and the store."""
    check: CheckRow
    groups: Iterable[tuple[str, Iterable[Stretch]]]
    """Stretches to read, and the name of each group of them in lines of progress."""
    parts: Callable[[TokenLosses, Sequence[Stretch], Sequence[np.ndarray]], Iterable[Masks]]
    """Function from the model, stretches and their losses to parts of each stretch."""
    panels: Callable[[Sequence[Row]], dict[str, Mapping[int, Loss]]]
    """Function from all rows to losses by a number of tokens, by the title of their table and curve."""


def evaluate_perplexity(args: argparse.Namespace) -> None:
    """Run `ringformer eval perplexity`."""
    with _opened(args) as (model, documents):
        lengths = model.lengths
        longest = max(model.lengths)
        last = min(lengths) // 2 if args.last is None else args.last
        by_context.check(lengths, last)
        chosen = documents.choose(longest, args.documents, say)

        def groups() -> Iterator[tuple[str, Iterable[Stretch]]]:
            for length in lengths:
                stretch = partial(by_context.stretch, documents, length=length, longest=longest)
                yield f"{length:,} tokens", map(stretch, chosen)

        def panels(rows: Sequence[Row]) -> dict[str, Mapping[int, Loss]]:
            return {
                f"the same last {last:,} tokens, by tokens of the context": losses_by_context(rows, by_context.LAST),
                "the longest context, by tokens before the predicted one": by_context.by_position(rows),
            }

        evaluation = Evaluation(
            "perplexity",
            "perplexity",
            {"last": last, "ends_at": longest},
            by_context.check_row,
            groups(),
            lambda _model, batch, _losses: [by_context.parts(stretch, last) for stretch in batch],
            panels,
        )
        _run(evaluation, args, model, documents)


def evaluate_sliding(args: argparse.Namespace) -> None:
    """Run `ringformer eval sliding`."""
    with _opened(args) as (model, documents):
        sliding.check(model.lengths, args.stride, documents.begin, args.tokens)
        chosen = documents.choose(max(model.lengths), args.documents, say)

        def groups() -> Iterator[tuple[str, Iterable[Stretch]]]:
            for length, document in product(model.lengths, chosen):
                name = f"{length:,} tokens, document {document}"
                yield name, sliding.windows(documents, document, length, args.stride, args.tokens)

        evaluation = Evaluation(
            "sliding",
            f"sliding window of stride {args.stride:,}",
            {"stride": args.stride, "tokens": args.tokens},
            check_row,
            groups(),
            lambda _model, batch, _losses: [{}] * len(batch),
            lambda rows: {"tokens of the documents, by tokens of the window": losses_by_context(rows, ALL)},
        )
        _run(evaluation, args, model, documents)


def evaluate_longppl(args: argparse.Namespace) -> None:
    """Run `ringformer eval longppl`."""
    rule = KeyTokens(args.alpha, args.beta, args.short, args.stride)
    with _opened(args) as (model, documents), _evaluator(args, model) as evaluator:
        rule.check(model.lengths)
        chosen = documents.choose(max(model.lengths), args.documents, say)
        read = documents._replace(begin=evaluator.text.begin)
        begin = max(len(documents.begin), len(read.begin))

        def groups() -> Iterator[tuple[str, Iterable[Stretch]]]:
            for length in model.lengths:
                stretches = (documents.stretch(length, document, 0, length - begin) for document in chosen)
                yield f"{length:,} tokens", stretches

        def texts(batch: Sequence[Stretch]) -> list[list[int]]:
            return [read.stretch(x.length, x.document, 0, x.length - begin).tokens.tolist() for x in batch]

        @cache
        def evaluator_losses() -> TokenLosses:
            return evaluator.load(max(model.lengths)).generator.token_losses

        def parts(own: TokenLosses, batch: Sequence[Stretch], losses: Sequence[np.ndarray]) -> Iterable[Masks]:
            token_losses = own if evaluator is model else evaluator_losses()
            with_long = losses if evaluator is model else token_losses(texts(batch))
            masks = rule.masks(token_losses, texts(batch), with_long)
            for mask, of_all in zip(masks, losses, strict=True):
                yield part(mask, len(of_all))

        def panels(rows: Sequence[Row]) -> dict[str, Mapping[int, Loss]]:
            return {
                "LongPPL (key tokens), by tokens of the context": losses_by_context(rows, KEY),
                "PPL (all tokens), by tokens of the context": losses_by_context(rows, ALL),
            }

        by = "the evaluated model" if evaluator is model else evaluator.name
        evaluation = Evaluation(
            "longppl",
            f"LongPPL, key tokens by {by}",
            {"rule": rule._asdict(), "evaluator": evaluator.settings},
            lambda row: check_row(row, KEY),
            groups(),
            parts,
            panels,
        )
        _run(evaluation, args, model, documents)


@contextmanager
def _opened(args: argparse.Namespace) -> Iterator[tuple[Opened, Documents]]:
    """Open the model and the documents of its tokenizer. Raises ValueError for a store of another one."""
    store = open_one(args.store, ("eval", "train"))
    with opened(args) as model:
        if earlier := model.text.beginning.describe_earlier():
            say(earlier)
        if store.meta["tokenizer"] != (name := model.text.tokenizer.name):
            raise ValueError(
                f"{store.path} was made with tokenizer {store.meta['tokenizer']}, but the model has {name}: name a "
                "store of the model's tokenizer, or add --tokenizer, that of this store, and --allow=data.tokenizer"
            )
        yield model, Documents(store, model.text.begin, model.text.tokenizer.byte_lengths)


@contextmanager
def _evaluator(args: argparse.Namespace, model: Opened) -> Iterator[Opened]:
    """Open the model that finds key tokens, the evaluated one by default. Raises ValueError for another tokenizer."""
    if args.evaluator is None:
        yield model
        return
    with opened_model(args, args.evaluator) as evaluator:
        if evaluator.text.tokenizer.name != (name := model.text.tokenizer.name):
            raise ValueError(
                f"--evaluator={args.evaluator} has tokenizer {evaluator.text.tokenizer.name}, but the model has "
                f"{name}: name an evaluator with the same tokenizer"
            )
        yield evaluator


def _run(evaluation: Evaluation, args: argparse.Namespace, model: Opened, documents: Documents) -> None:
    """Read all stretches that the file of cases lacks, and write the outputs."""
    name = evaluation.name
    store = documents.store
    settings = {"store": store.meta["fingerprint"], "documents": args.documents, "begin": documents.begin}
    with model.cases(name, settings | evaluation.settings, evaluation.check) as file:
        token_losses = model.load(max(model.lengths)).generator.token_losses

        def rows_of(batch: Sequence[Stretch]) -> Iterator[Row]:
            losses = token_losses([stretch.tokens.tolist() for stretch in batch])
            parts = evaluation.parts(token_losses, batch, losses)
            for stretch, of_stretch, masks in zip(batch, losses, parts, strict=True):
                yield documents.row(stretch, of_stretch, masks)

        for group, stretches in evaluation.groups:
            before = len(file.rows)
            missing = (stretch for stretch in stretches if file.missing([stretch]))
            file.measure(missing, args.batch_size, rows_of)
            say(f"{group}: {len(file.rows) - before} read")
        store.check.wait(say)
        rows = list(file.rows.values())
        panels = evaluation.panels(rows)
        tables = []
        for name_of_panel, losses in panels.items():
            tables.append(f"{name_of_panel}:\n{loss_table(losses)}")
        title = f"{evaluation.title}: {model.name}, on {Path(store.path)}"
        write_outputs(file, title, "\n\n".join(tables), draw_losses, panels)
