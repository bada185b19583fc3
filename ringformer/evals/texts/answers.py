"""Answers as scorers of questions compare them."""

import re
import string


def normalized(text: str) -> str:
    """Return a text without case, punctuation, articles and repeated white space, as SQuAD's scorer compares it
    (Rajpurkar et al. 2016, arXiv:1606.05250)."""
    plain = without(text.lower(), string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def without(text: str, marks: str) -> str:
    """Return a text without some characters."""
    return "".join(c for c in text if c not in marks)
