"""Formats that would read a record that the chosen format cannot read."""

from typing import Any

from ringformer.data.chats.conversations import formats_of
from ringformer.data.stores.token_rows import IDS


def ways_to_read(record: dict[str, Any], but: str) -> str:
    """Return the options of `data prepare` with which a record can be read; empty if there are none.

    Args:
      but: the format that cannot read it.
    """
    readable: list[str] = [*formats_of(record)]
    if isinstance(record.get(IDS), list):
        readable.append("tokens")
    ways = [f"--format={name}" for name in readable if name != but]
    texts = [key for key, value in record.items() if isinstance(value, str) and value]
    if but == "documents":
        ways += [f"--field={key}" for key in texts]
    elif "text" in texts:
        ways.append("--format=documents")
    elif not ways:
        ways += [f"--format=documents --field={key}" for key in texts]
    if not ways:
        return ""
    return f"It can be read with {' or '.join(ways)}"
