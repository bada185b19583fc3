"""Texts that tokenizers must give back as they were."""

import sysconfig
from pathlib import Path

STDLIB = Path(sysconfig.get_path("stdlib"))
CODE = [(STDLIB / name).read_text(encoding="utf-8") for name in ("ast.py", "json/decoder.py", "textwrap.py")]
TEXTS = [
    *CODE,
    "\tif x:\n\t\treturn  1\r\n\n    \n",
    "  two spaces before and after  ",
    "naïve café, 日本語, 🙂, e\u0301, no-break\u00a0space, ideographic\u3000space",
    "control \0 \x1b and </s> <s> <unk> <0x0A> as text",
    "",
]
