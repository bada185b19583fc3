"""lm-evaluation-harness 0.4.13 on a ringformer model: `ringformer eval harness`, or an `LM` for its Python interface.

Requests are tokenized, cut and scored as by the harness's own `hf` models; choices about one context read it once.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from ringformer.data.chats.conversations import Message
from ringformer.data.tokenizers.base import Segment
from ringformer.evals.evaluation_setup import opened, out_folder, say
from ringformer.evals.harness_tasks import read_tasks
from ringformer.files.atomic import write_whole
from ringformer.files.run_layout import RESULTS
from ringformer.inference.sampling import Sampling
from ringformer.inference.session import Session
from ringformer.inference.session_arrays import Scores
from ringformer.inference.text.text_generator import TextGenerator

MAX_NEW = 256
"""New tokens of a request that sets no number, as of the harness's `hf` models."""

REPORTED = ("results", "versions", "n-shot", "configs", "n-samples")
"""Parts of the harness's results that are written."""
Request = tuple[Any, list[int], list[int]]
"""Texts, tokens of the context, and tokens of the continuation."""


class Cut(NamedTuple):
    """Tokens of a request that fit into the context, of which the last predicts nothing."""

    context: tuple[int, ...]
    continuation: list[int]


class HarnessModel(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=...)`.

    Args:
      text: the model with its tokenizer. Requests have at most its max_length - 1 tokens to read: a session also keeps
        the last token of a continuation, which predicts nothing.
      batch_size: rows to compute at a time, a multiple of dp.
    """

    def __init__(self, text: TextGenerator, batch_size: int = 1):
        super().__init__()
        self._text = text
        self._generator = text.generator
        self._batch_size = batch_size
        self._tokenizer = text.tokenizer
        self.max_length: int = text.generator.max_length - 1
        names = sorted(self._tokenizer.controls, key=len, reverse=True)
        any_name = "|".join(map(re.escape, names)) or "(?!)"  # which nothing matches
        self._control_names = re.compile(f"({any_name})")

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        bos = self._tokenizer.bos_id
        return self._tokenizer.eos_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text in which names of control tokens are those tokens, as Hugging Face does: the harness passes
        rendered chats as text."""
        controls: Mapping[str, int] = self._tokenizer.controls
        parts = filter(None, self._control_names.split(string))
        segments = [Segment(part, control=controls.get(part)) for part in parts]
        encoded, _mask = self._tokenizer.encode_chats([segments])[0]
        ids = encoded.tolist()
        if add_special_tokens is False or not self._text.text.beginning.in_harness:
            return ids
        begin = [self.prefix_token_id]
        if add_special_tokens is None and ids[:1] == begin:
            return ids
        return begin + ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a chat as text, up to the next answer, or up to the end of its last answer."""
        messages = [Message(turn["role"], turn["content"]) for turn in chat_history]
        return self._text.text.chat_text(messages, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if not chat_template:
            return None
        text = self._text.text
        return " ".join(filter(None, (text.template_name, text.template_option)))

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        cut = [self._cut(context, continuation) for _text, context, continuation in requests]
        order = sorted(range(len(cut)), key=lambda i: (-len(cut[i].context), cut[i]))
        scored: dict[int, tuple[float, bool]] = {}
        rest: list[int] = []
        for _, group in itertools.groupby(order, key=lambda i: cut[i].context):
            members = list(group)
            if len(members) > 1 and self._generator.can_fork:
                scored |= self._choices(members, cut)
            else:
                rest += members
        for batch in self._fitting(rest, cut):
            session = self._session(len(batch))
            contexts, continuations = zip(*_filled(_at(cut, batch), len(session.lengths)), strict=True)
            session.append(list(map(list, contexts)))
            scored |= _sums(batch, session.score(list(continuations)))
        for i, (text, _context, _continuation) in enumerate(requests):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, scored[i])
        return _at(scored, range(len(requests)))

    def _cut(self, context: list[int], continuation: list[int]) -> Cut:
        """Cut a request as `hf` models do, to its last tokens."""
        if not continuation:
            raise ValueError("a task asks for the likelihood of no tokens: its choices must not be empty")
        whole = (context + continuation)[-(self.max_length + 1) :]
        kept = min(len(continuation), len(whole) - 1)
        return Cut(tuple(whole[:-kept]), whole[-kept:])

    def _session(self, rows: int) -> Session:
        """Start a session of at least so many rows, a multiple of dp."""
        return self._generator.session(rows + -rows % self._generator.mesh.shape["dp"])

    def _fitting(self, members: Sequence[int], cut: Sequence[Cut]) -> Iterator[list[int]]:
        """Yield batches whose longest context and longest continuation fit into a session together: rows of unequal
        length share its slots."""
        batch: list[int] = []
        context = continuation = 0
        for i in members:
            context = max(context, len(cut[i].context))
            continuation = max(continuation, len(cut[i].continuation))
            if batch and (len(batch) == self._batch_size or context + continuation > self.max_length + 1):
                yield batch
                batch = []
                context, continuation = map(len, cut[i])
            batch.append(i)
        if batch:
            yield batch

    def _choices(self, members: list[int], cut: Sequence[Cut]) -> dict[int, tuple[float, bool]]:
        """Score continuations of one context, which is read once."""
        session = self._generator.session(1)
        scored: dict[int, tuple[float, bool]] = {}
        session.append([list(cut[members[0]].context)])
        for batch in _batches(members, self._batch_size):
            continuations = [cut[i].continuation for i in batch]
            fork = session.fork(self._batch_size, max_new=max(2, *map(len, continuations)))
            scored |= _sums(batch, fork.score(_filled(continuations, self._batch_size)))
            del fork
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of the context that do not share a predicted token."""
        windows: list[Request] = []
        numbers = []  # of the text of each window
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                numbers.append(number)
        totals = [0.0] * len(requests)
        for number, (total, _) in zip(numbers, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to a stop string or an end token."""
        answers: dict[int, str] = {}
        first_row = 0
        settings = [json.dumps(request.args[1], sort_keys=True) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (settings[i], -len(requests[i].args[0])))
        for _, group in itertools.groupby(order, key=lambda i: settings[i]):
            for batch in _batches(list(group), self._batch_size):
                answers |= self._generate(batch, requests, first_row)
                first_row += len(batch)
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, answers[i])
        return _at(answers, range(len(requests)))

    def _generate(self, batch: Sequence[int], requests: list[Instance], first_row: int) -> dict[int, str]:
        """Continue the contexts of a batch of requests, which have the same settings. The draws are those of the rows
        from `first_row` on."""
        settings = normalize_gen_kwargs(requests[batch[0]].args[1], MAX_NEW)
        names = {i: name for name, i in self._tokenizer.controls.items()}
        stops = handle_stop_sequences(settings.pop("until"), eos=names.get(self.eot_token_id))
        most = settings.pop("max_gen_toks")
        temperature = settings.pop("temperature", 0.0)
        sampling = Sampling(temperature, top_k=settings.pop("top_k", None), top_p=settings.pop("top_p", None))
        settings.pop("do_sample", None)
        if settings:
            raise ValueError(f"a task asks for {', '.join(settings)}, which ringformer's generation does not have")
        if (room := self.max_length - most) < 1:
            raise ValueError(f"a task generates {most} tokens, beyond the context of {self.max_length}: set --length")
        contexts = [self.tok_encode(requests[i].args[0])[-room:] for i in batch]
        session = self._session(len(batch))
        session.append(_filled(contexts, len(session.lengths)))
        rows: list[list[int]] = [[] for _ in batch]
        for idle in range(len(batch), len(session.lengths)):
            session.end(idle)
        steps = session.decode(
            max_new_tokens=most, sampling=sampling, end_tokens=self._text.text.end_tokens, first_row=first_row
        )
        for step in steps:
            for number, (row, token) in enumerate(zip(rows, step, strict=False)):
                if token is not None:
                    row.append(token)
                    name = names.get(token, "")  # `hf` models also look for stop strings in names
                    if any(stop in name or stop in self._tokenizer.decode(row) for stop in stops):
                        session.end(number)
        answers = {}
        for i, row in zip(batch, rows, strict=True):
            answers[i] = postprocess_generated_text(self._tokenizer.decode(row), stops, None)
        return answers


def _batches(members: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(members), size):
        yield members[start : start + size]


def _at(items: Any, members: Iterable[int]) -> list[Any]:
    """Return the items at some places."""
    return [items[i] for i in members]


def _filled(rows: list[Any], number: int) -> list[Any]:
    """Return so many rows: the last is repeated."""
    return rows + rows[-1:] * (number - len(rows))


def _sums(members: Sequence[int], scores: Sequence[Scores]) -> dict[int, tuple[float, bool]]:
    """Return the log-likelihood of each continuation, and whether every token of it is the likeliest."""
    sums = {}
    for i, score in zip(members, scores, strict=False):
        sums[i] = -float(score.losses.sum(dtype="float64")), bool(score.likeliest.all())
    return sums


def evaluate_harness(args: argparse.Namespace) -> None:
    """Run `ringformer eval harness`: print the harness's table, and write its results."""
    names = list(map(str.strip, args.tasks.split(",")))
    with opened(args) as model, out_folder(args, "harness", (RESULTS,)) as folder:
        if earlier := model.text.beginning.describe_earlier(harness=True):
            say(earlier)
        manager, tasks = read_tasks(names, args.include_path, model.text.tokenizer, model.lengths)
        results = simple_evaluate(
            HarnessModel(model.load(model.lengths[-1] + 1), args.batch_size),
            tasks=tasks,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            apply_chat_template=args.chat,
            task_manager=manager,
            bootstrap_iters=1000,
        )
        assert results is not None
        print(make_table(results))
        kept = {key: results[key] for key in REPORTED if key in results}
        content = kept | {"model": model.identity, "length": model.lengths[-1]}
        write_whole(folder / RESULTS, json.dumps(content, indent=1, default=str) + "\n")
        say(f"{folder}: {RESULTS}")
