"""Make untrusted text safe to print on a terminal.

A document, a model's answer, or the name of a field or file may hold sequences that clear the screen, retitle the
window or write the clipboard, and characters that reverse the reading order.
"""

_COMMANDS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
_ORDER = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SURROGATES = range(0xD800, 0xE000)
_ESCAPES = {c: f"\\x{c:02x}" for c in _COMMANDS} | {c: f"\\u{c:04x}" for c in (*_ORDER, *_SURROGATES)}


def visible(text: str) -> str:
    """Escape control characters except newlines and tabs, overrides of the writing direction, and surrogates (bytes
    that are not UTF-8), as in Python: \\x1b, \\u202e, \\udc9b.

    Characters are escaped one by one, so a text can be escaped in pieces.
    """
    return text.translate(_ESCAPES)
