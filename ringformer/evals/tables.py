"""Text tables that summarize evaluations."""

from collections.abc import Mapping, Sequence
from math import sqrt

from ringformer.evals.case_file import Row
from ringformer.evals.perplexity import Loss


def mean(rows: Sequence[Row]) -> float:
    """Mean score of some cases, from 0 to 1."""
    return sum(row["score"] for row in rows) / len(rows)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval for a share of `count` right or wrong cases: 50 of 50 gives 92.9 to 100%."""
    z = 1.959964  # 97.5% of a normal distribution
    middle, spread = share + z**2 / (2 * count), z * sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    low, high = ((middle + sign * spread) / (1 + z**2 / count) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def mean_tokens(rows: Sequence[Row]) -> float:
    """Mean prompt length in tokens."""
    return sum(row["prompt_tokens"] for row in rows) / len(rows)


def grouped(rows: Sequence[Row], field: str) -> dict:
    """Group rows by the value of a field, in sorted order."""
    return {value: [row for row in rows if row[field] == value] for value in sorted({row[field] for row in rows})}


def contexts(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Group cases of line retrieval by context, or by number of lines if they have no context."""
    return grouped(rows, "num_lines" if rows[0]["length"] is None else "length")


def lines_table(rows: Sequence[Row]) -> str:
    """Tabulate accuracy by context, with its 95% interval."""
    by_lines = rows[0]["length"] is None
    text = [
        f"{'lines' if by_lines else 'context':>10} {'prompt tokens':>14} {'lines':>13} {'cases':>6} {'accuracy':>9} "
        f"{'95% interval':>13}"
    ]
    for context, group in contexts(rows).items():
        fewest, most = (pick(row["num_lines"] for row in group) for pick in (min, max))
        lines = f"{fewest:,}" if fewest == most else f"{fewest:,}-{most:,}"
        low, high = wilson(mean(group), len(group))
        text.append(
            f"{context:>10,} {mean_tokens(group):>14,.0f} {lines:>13} {len(group):>6} {mean(group):>9.1%} "
            f"{f'{100 * low:.1f}-{high:.1%}':>13}"
        )
    return "\n".join(text)


def cross_table(rows: Sequence[Row], field: str, corner: str, label: str = "{}") -> str:
    """Tabulate mean scores times 100, with a row for each value of a field and a column for each context."""
    lengths = grouped(rows, "length")
    text = [f"{corner:>16}" + "".join(f"{length:>11,}" for length in lengths)]
    for value, group in grouped(rows, field).items():
        cells = [[row for row in group if row["length"] == length] for length in lengths]
        scores = "".join(f"{100 * mean(cell):>11.1f}" if cell else f"{'-':>11}" for cell in cells)
        text.append(f"{label.format(value):>16}{scores}")
    text.append(f"{'mean':>16}" + "".join(f"{100 * mean(group):>11.1f}" for group in lengths.values()))
    return "\n".join(text)


def perplexity_tables(by_context: Mapping[int, Loss], by_position: Mapping[int, Loss], last: int) -> str:
    """Tabulate losses by context, and by position at the longest context."""
    columns = f"{'tokens':>12} {'nats':>8} {'bits/byte':>10} {'perplexity':>11}"
    text = [
        f"the same last {last:,} tokens of each document, with so many tokens in all:",
        f"{'context':>22} {columns}",
    ]
    text += [f"{length:>22,} {_losses(loss)}" for length, loss in by_context.items()]
    text += ["", "at the longest context, tokens with so many before them, and up to twice as many:"]
    text.append(f"{'from position':>22} {columns}")
    text += [f"{k:>22,} {_losses(loss)}" for k, loss in by_position.items()]
    return "\n".join(text)


def _losses(loss: Loss) -> str:
    return f"{loss.tokens:>12,} {loss.nats:>8.4f} {loss.bits_per_byte:>10.4f} {loss.perplexity:>11,.2f}"
