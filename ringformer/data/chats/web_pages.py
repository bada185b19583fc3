"""Text of documents that are HTML pages, as Markdown: the cleaning rule `html` of documents."""

import re

from ringformer.data.chats.cleaning import is_html, to_markdown
from ringformer.data.optional_packages import needed_for
from ringformer.data.sources.documents import Document
from ringformer.data.sources.malformed import MalformedRecord
from ringformer.data.sources.source_files import uncompressed

SUFFIXES = (".html", ".htm", ".xhtml")
"""Ends of the names of files that are pages."""
WITHOUT_TEXT = ("script", "style", "template", "noscript", "svg")
"""Elements of a page that a reader does not see as text."""

_PAGE = re.compile(r"\ufeff?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html)\b", re.DOTALL | re.IGNORECASE)


def extracted(document: Document) -> Document:
    """Return a document with its text in place of its HTML; return a document that is not HTML as it is.

    A file is HTML by its name, or if it begins as a page does; the text of a record also if it is one element, as in
    conversations. Raises MalformedRecord for a page that is nested too deeply.
    """
    of_name = document.is_file and uncompressed(document.name).lower().endswith(SUFFIXES)
    if of_name or _PAGE.match(document.text) or (not document.is_file and is_html(document.text)):
        return document._replace(text=page_text(document.text))
    return document


def page_text(html: str) -> str:
    """Return the text of a page as Markdown, without scripts and styles; its title becomes a heading if it has none.

    Navigation and other text around the content is kept. Raises MalformedRecord for a page that is nested too deeply.
    """
    with needed_for("the cleaning rule html"):
        from bs4 import BeautifulSoup
        from bs4.element import PreformattedString

    try:
        page = BeautifulSoup(html, "html.parser")
        for element in page.find_all(WITHOUT_TEXT):
            element.decompose()
        for string in page.find_all(string=lambda text: isinstance(text, PreformattedString)):
            string.extract()
        title = ""
        if page.title is not None:
            title = page.title.extract().get_text(" ", strip=True)
        text = to_markdown(str(page))
    except RecursionError:
        raise MalformedRecord("its HTML is nested too deeply", "HTML nested too deeply") from None
    if title and page.h1 is None:
        return f"# {title}\n\n{text}"
    return text
