"""The likely encoding of a file, the first of a list that decodes it, and files that are no text."""

import pytest

from ringformer.data.sources.text_encoding import Undecodable, decode, is_binary, parse_encodings

WEST = "Naïve “quotes” — l'élève français, Größe, 5 €. "
RUSSIAN = "Привет, как дела? Это обычный русский текст. "
JAPANESE = "日本語のテキストです。これはテストです。"
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xdc\xdc"


@pytest.mark.parametrize("times", [1, 2000])
@pytest.mark.parametrize(
    ("text", "encoding", "likely"),
    [
        (WEST, "cp1252", "cp1252"),
        ("some \x81 letters é", "latin-1", "latin-1"),
        (WEST, "utf-16", "utf-16"),
        (WEST, "utf-32", "utf-32"),
        (WEST, "utf-16-le", "utf-16-le"),
        ("plain text", "utf-16-be", "utf-16-be"),
        (f'{{"text": "{JAPANESE}"}}\n', "utf-16-le", "utf-16-le"),
        (f'[["{JAPANESE}"]]\n', "utf-16-be", "utf-16-be"),
        (RUSSIAN, "cp1251", "cp1251"),
        (JAPANESE, "cp932", "cp932"),
        (f"# -*- coding: iso-8859-2 -*-\n{'Zażółć gęślą jaźń. '}", "iso-8859-2", "iso-8859-2"),
        (f"<meta charset='koi8-r'>{RUSSIAN}", "koi8-r", "koi8-r"),
        (f"<meta charset='utf-9'>{WEST}", "cp1252", "cp1252"),
    ],
)
def test_the_likely_encoding_decodes_the_file(text, encoding, likely, times):
    content = (text * times).encode(encoding)
    with pytest.raises(Undecodable) as caught:
        decode(content, ("utf-8",))
    assert caught.value.likely == likely
    assert decode(content, ("utf-8", likely)) == text * times
    assert not is_binary(content, ("utf-8",))


@pytest.mark.parametrize(
    ("encodings", "content", "text"),
    [
        (("utf-8", "latin-1"), "é".encode(), "é"),
        (("utf-8", "latin-1"), b"\xe9", "é"),
        (("utf-8", "utf-16", "latin-1"), b"\xe9a", "éa"),
        (("utf-8", "utf-16", "latin-1"), "é".encode("utf-16"), "é"),
        (("latin-1", "utf-16"), "é".encode("utf-16"), "é"),
        (("utf-16-be", "utf-8"), "é".encode("utf-16-be"), "é"),
        (("utf-8", "latin-1"), "é".encode("utf-16"), None),
        (("utf-16",), "é".encode("utf-16-le"), None),
        (("utf-8", "cp1252"), "plain text".encode("utf-16-le"), None),
        (("utf-8", "utf-16-be", "cp1252"), "plain text".encode("utf-16-be"), "plain text"),
        (("ascii", "utf-8"), b"\xe9", None),
        (("utf-8",), "\ufeffé".encode(), "é"),
        (("utf-8", "utf-16-le"), "\ufeffé".encode("utf-16-le"), "é"),
        (("utf-8", "utf-16-le"), "plain text".encode("utf-16-be"), None),
        (("utf-8", "cp1252", "utf-16-le"), "é日本語\n日本".encode("utf-16-le"), "é日本語\n日本"),
    ],
    ids=[
        "utf-8 first",
        "latin-1 last",
        "utf-16 without a mark is passed",
        "utf-16 by its mark",
        "utf-16 before latin-1",
        "a named byte order",
        "a mark that the list lacks",
        "no mark",
        "zeros between letters",
        "zeros and a named byte order",
        "the first of two",
        "a mark of UTF-8",
        "a mark, by its named byte order",
        "the other byte order",
        "few zeros, behind an encoding that reads them",
    ],
)
def test_the_first_encoding_that_can_decodes(encodings, content, text):
    if text is None:
        with pytest.raises(Undecodable, match=rf"^byte .* at [01] is not {' or '.join(encodings)}; likely "):
            decode(content, encodings)
    else:
        assert decode(content, encodings) == text


@pytest.mark.parametrize(
    ("content", "encodings", "binary"),
    [
        (b"", ("utf-8",), False),
        (b"text" * 10_000 + b"\0", ("utf-8",), False),
        (b"\x7fELF\x02\x01\x01\0\0\0\0", ("utf-8",), True),
        (b"%PDF-1.7 \xff", ("utf-8", "latin-1"), True),
        (b"a\0b\0c\0d\0", ("utf-8", "latin-1"), False),
        (b"a\0\0b\0\0c", ("utf-8",), True),
        ("日本a".encode("utf-16-le"), ("utf-8",), True),
        ("日本a".encode("utf-16-le"), ("utf-8", "utf-16-le"), False),
        (PNG, ("utf-8", "utf-16-le", "latin-1"), True),
        (PNG, ("utf-32-be", "utf-8", "latin-1"), True),
        (b"%PDF-1.7\n\0\1", ("utf-8", "utf-16-le", "latin-1"), True),
    ],
)
def test_bytes_that_are_no_text(content, encodings, binary):
    assert is_binary(content, encodings) is binary


def test_other_names_of_wide_encodings_mean_the_same():
    assert parse_encodings("UTF8, utf16,UTF_16LE,u32,latin-1") == ("utf8", "utf-16", "utf-16-le", "utf-32", "latin-1")
