"""Report on the preparation of stores, as JSON and as text."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ringformer.cli.visible_text import visible
from ringformer.data.stores.beginning import bos_name
from ringformer.data.stores.token_store import TokenStore
from ringformer.data.tokenizers.base import Tokenizer

NAMED = 10
"""Most files of a reason that the text names; the report as JSON names all."""


def make_report(
    stores: Mapping[str, TokenStore],
    tokenizer: Tokenizer,
    left_out: Mapping[str, int],
    files: Mapping[str, list[str]],
    seconds: float,
) -> dict[str, Any]:
    """Return the report: the documents, tokens, masked share, beginnings and lengths of each store, and what was left
    out.

    Args:
      files: names of the files left out, by reason.
    """
    report: dict[str, Any] = {}
    tokens = 0
    for name, store in stores.items():
        report[name] = _describe(store)
        tokens += store.meta["tokens"]
    report["begin"] = None if tokenizer.bos_id is None else bos_name(tokenizer)
    report["left_out"] = {reason: count for reason, count in sorted(left_out.items()) if count}
    report["files_left_out"] = dict(files)
    return report | {"seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds)}


def format_report(report: Mapping[str, Any]) -> str:
    """Format the report as text, with a histogram of lengths for each store."""
    lines = []
    for name in ("train", "eval"):
        if name not in report:
            continue
        store = report[name]
        lines.append(
            f"{name}: {store['documents']:,} documents, {store['tokens']:,} tokens, "
            f"{store['masked_share']:.1%} of them masked"
        )
        if report.get("begin"):  # reports of earlier versions have none
            lines.append(f"  {store['begun']:,} of the documents begin with {visible(report['begin'])}")
        largest = max(store["lengths"].values())
        for length, count in store["lengths"].items():
            bar = "#" * round(40 * count / largest)
            lines.append(f"  {int(length):>10,}+ {count:>10,} {bar}")
    for reason, count in report["left_out"].items():
        lines.append(f"{count:,} {reason}")
    for reason, names in report.get("files_left_out", {}).items():  # reports of earlier versions have none
        line = f"{reason}: {', '.join(names[:NAMED])}"
        if len(names) > NAMED:
            line += f" and {len(names) - NAMED:,} more (report.json)"
        lines.append(line)
    lines.append(f"{report['seconds']:.1f} seconds, {report['tokens_per_second']:,} tokens a second")
    return "\n".join(lines)


def _describe(store: TokenStore) -> dict[str, Any]:
    meta = store.meta
    powers, counts = np.unique(np.frexp(np.diff(store.offsets))[1] - 1, return_counts=True)
    lengths = {str(2**power): count for power, count in zip(powers.tolist(), counts.tolist(), strict=True)}
    return {
        "documents": meta["documents"],
        "tokens": meta["tokens"],
        "masked_share": round(1 - meta["trained_tokens"] / meta["tokens"], 6),
        "fingerprint": meta["fingerprint"],
        "begun": store.begun,  # documents that begin with the tokenizer's BOS token
        # Number of documents with at least this many tokens and less than twice as many.
        "lengths": lengths,
    }
