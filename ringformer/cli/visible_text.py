"""Text of strangers, as a terminal may have it: what would be a command to the terminal is seen instead.

A document, a model's answer, a field's name or a file's may hold sequences that clear the screen, retitle the window or
write the clipboard, and characters that turn the order of what is read around.
"""

_COMMANDS = [*(c for c in range(0x20) if chr(c) not in "\n\t"), *range(0x7F, 0xA0)]
_ORDER = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SURROGATES = range(0xD800, 0xE000)
_ESCAPES = {c: f"\\x{c:02x}" for c in _COMMANDS} | {c: f"\\u{c:04x}" for c in (*_ORDER, *_SURROGATES)}


def visible(text: str) -> str:
    """The text with control characters (but newlines and tabs), overrides of the writing direction, and what stands
    for bytes that are no UTF-8, written as in Python: \\x1b, \\u202e, \\udc9b.

    Each character stands for itself: pieces of a text, made visible one by one, are the text made visible.
    """
    return text.translate(_ESCAPES)
