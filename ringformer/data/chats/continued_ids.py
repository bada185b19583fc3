"""Ids of answers that continue the ids of their prompts.

Text between two control tokens is encoded in one piece, so a token may hold the end of a prompt and the beginning of
its answer: a template's newline with those that an answer begins with. A model that answers never meets this token,
because it is given the ids of the prompt alone. Before such an answer, the text is therefore encoded in two pieces. For
the answers behind it, it stands in the history with the tokens that it was trained on, and that a model would write.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from ringformer.data.tokenizers.base import Segment, Tokenizer

Encoded = tuple[np.ndarray, np.ndarray]
"""Ids of a sequence, and a mask of those that are trained on."""


def encode_answers(tokenizer: Tokenizer, chats: Sequence[Sequence[Segment]]) -> list[Encoded | ValueError]:
    """Encode each sequence as `Tokenizer.encode_chats` does, but without a token that holds parts of a prompt and of
    its answer. The result is an error for a sequence that the tokenizer cannot encode in two pieces."""
    encoded = tokenizer.encode_chats(chats)
    headers = list(map(_headers, chats))
    distinct: set[tuple[Segment, ...]] = set()
    for of_chat in headers:
        distinct.update(of_chat.values())
    header_ids = {}
    for header, (ids, _) in zip(distinct, tokenizer.encode_chats(list(distinct)), strict=True):
        header_ids[header] = ids
    results: list[Encoded | ValueError] = []
    for chat, whole, of_chat in zip(chats, encoded, headers, strict=True):
        all_ids, trained = whole
        begins = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0) == 1)
        joined = []
        for (place, header), begin in zip(of_chat.items(), begins, strict=True):
            if not _ends_with(all_ids[:begin], header_ids[header]):
                joined.append(place)
        results.append(_apart(tokenizer, chat, whole, joined) if joined else whole)
    return results


def _headers(chat: Sequence[Segment]) -> dict[int, tuple[Segment, ...]]:
    """Return what stands before each answer, by the place of the answer's first segment: the last control token, if
    there is one, and the text behind it."""
    headers = {}
    begin = 0
    for place, segment in enumerate(chat):
        if segment.trained and not (place and chat[place - 1].trained):
            headers[place] = tuple(part._replace(trained=False) for part in chat[begin:place])
        if segment.control is not None:
            begin = place
    return headers


def _ends_with(ids: np.ndarray, last: np.ndarray) -> bool:
    return len(last) <= len(ids) and np.array_equal(ids[len(ids) - len(last) :], last)


def _apart(
    tokenizer: Tokenizer, chat: Sequence[Segment], whole: Encoded, places: Sequence[int]
) -> Encoded | ValueError:
    """Encode a sequence in pieces that begin at `places`."""
    bounds = [0, *places, len(chat)]
    pieces = [chat[begin:end] for begin, end in itertools.pairwise(bounds)]
    ids_of_pieces, masks_of_pieces = zip(*tokenizer.encode_chats(pieces), strict=True)
    ids = np.concatenate(ids_of_pieces)
    if tokenizer.decode(ids) != tokenizer.decode(whole[0]):
        first = places[0]
        return ValueError(
            f"tokenizer {tokenizer.name} joins the beginning of an answer, {chat[first].text[:20]!r}, with the end of "
            f"its prompt, {chat[first - 1].text[-20:]!r}: let the answer begin with its first word, or choose a "
            "template whose prompt ends otherwise"
        )
    return ids, np.concatenate(masks_of_pieces)
