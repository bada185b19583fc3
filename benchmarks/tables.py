"""Tables of results in pages of the documentation."""

from pathlib import Path


def write_table(page: Path, begin: str, table: str, end: str) -> None:
    """Replace what is between two marks of a page by a table. Raises ValueError if the page lacks a mark."""
    text = page.read_text()
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no marks for the table: {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")
