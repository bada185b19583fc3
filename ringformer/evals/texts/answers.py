"""Answers as scorers of questions compare them."""

import re
import string


def normalized(text: str) -> str:
    """Return a text without case, punctuation, articles and repeated white space, as SQuAD's scorer compares it
    (Rajpurkar et al. 2016, arXiv:1606.05250)."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())
