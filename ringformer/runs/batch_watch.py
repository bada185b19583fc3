"""A count of odd batches, by which a store that was built wrongly is noticed."""

from typing import Any

PATIENCE = 100
"""Number of consecutive batches without a trained token (or, in chats, without a masked token) after which the store
counts as faulty."""


class BatchWatch:
    """Counts the batches without a token to train on and, in chats, the batches without a masked token.

    Single batches of either kind are normal: in a chat about a long document, a whole context may be part of a
    question, or of an answer. `PATIENCE` such batches in a row show that the store was built wrongly.
    """

    def __init__(self, chats: bool):
        self._kinds = {"no token to train on": "trained_tokens"}
        if chats:
            self._kinds["no question that is masked"] = "masked_tokens"
        self.counts = dict.fromkeys(self._kinds, 0)
        self._in_a_row = dict.fromkeys(self._kinds, 0)

    def see(self, step: int, values: dict[str, Any]) -> list[str]:
        """Count a step's batch and return remarks about it. Raises ValueError after `PATIENCE` odd batches in a row."""
        remarks = []
        for kind, name in self._kinds.items():
            self._in_a_row[kind] = 0 if values[name] else self._in_a_row[kind] + 1
            if values[name]:
                continue
            self.counts[kind] += 1
            if self._in_a_row[kind] == PATIENCE:
                raise ValueError(
                    f"{PATIENCE} batches in a row, up to step {step}, have {kind}: examine the trained tokens with "
                    "`ringformer data inspect`, check the chat template and the roles, and rebuild the store"
                )
            if self.counts[kind] == 1:
                remarks.append(f"the batch of step {step} has {kind}; such batches are counted")
        return remarks

    def summary(self, steps: int) -> list[str]:
        """Summarise the odd batches of the first `steps` steps."""
        return [f"{count} of {steps} batches had {kind}" for kind, count in self.counts.items() if count]
