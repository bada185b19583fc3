"""The answers of a conversation in what a chat template makes of it, and the sequences that train on them.

An answer is trained on as the model would write it: it begins where the template's prompt for it ends, and ends with
the token that ends its turn. Both are found by rendering the conversation up to the answer. `{% generation %}` marks in
the template may let it begin later.

A later rendering may write an answer in another way, for example without its thoughts. Such an answer has a sequence of
its own, which ends with it. All other answers stand in the sequence of the whole conversation.

An answer is refused if it does not continue its prompt, and a conversation if the template leaves out a part of it.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringformer.data.chats.left_out import part_left_out
from ringformer.data.chats.sandboxed_template import BREAK, START, STOP, ChatTemplate, Refused, without_marks

QUESTION = {"role": "user", "content": "What does a ring carry?"}
ANSWER = {"role": "assistant", "content": "It carries keys."}
"""A question and an answer, by which the end of a turn is found."""
EMPTY_THOUGHT = re.compile(r"\s*<(\w+)>\s*</\1>\s*|\s*<\|(\w+)>\w*\s*<\2\|>\s*")
"""End of a prompt for an answer without a thought, such as `<think></think>`."""


class Answer(NamedTuple):
    """An answer in its own turn, where it is the last message."""

    number: int
    """Place among the answers of the conversation, from 0."""
    text: str
    """The conversation up to the token that ends the answer."""
    start: int
    """Place in `text` where training begins."""


class Sequence(NamedTuple):
    """Text to train on some of the answers of a conversation."""

    text: str
    answers: list[Answer]
    """Answers that are trained on, in the order of the conversation."""


def sequences_of(template: ChatTemplate, conversation: list[list[Any]]) -> list[dict[str, Any]]:
    """Return the sequences that train on the answers of a conversation, in the order of their last answers. The last
    one is the whole conversation, if the last answer stands there as in its own turn.

    `conversation` has messages as [role, content, extra, is trained on]. Each sequence is
    {"parts": [[text, is trained on, is a control token], ...], "answers": their numbers}. An answer that is not trained
    on has a number if it stands in a sequence of others, and no sequence of its own.

    Raises Refused if there is no answer, an answer cannot be found or does not continue its prompt, or the template
    leaves out a part of the conversation.
    """
    messages = template.read(conversation)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise Refused("has no answer to train on: the conversation has none")
    is_trained = [trained for role, _, _, trained in conversation if role == "assistant"]
    whole = without_marks(template.render(messages))
    end = _end_of_turn(template)
    answers = [_answer(template, messages, place, number, end) for number, place in enumerate(places)]
    introduction = answers[0].text[: answers[0].start]
    turns = dict(zip(places, answers, strict=True))

    def shown(place: int) -> Iterator[str]:
        """Yield the text of an answer, and then the text with the part of its prompt that follows the question."""
        answer = turns[place]
        yield answer.text[answer.start :]
        before = without_marks(template.render(messages[:place]))
        yield answer.text[min(answer.start, len(before)) :]

    missing = part_left_out(messages, template.tools, introduction, whole, shown)
    if missing:
        raise Refused(
            f"leaves out {missing.replace(BREAK, '')}: remove it from the record, or choose a template that writes it"
        )
    sequences = []
    for sequence in _grouped(whole, answers, is_trained):
        numbers = [answer.number for answer in sequence.answers]
        sequences.append({"parts": template.at_controls(_pieces(sequence)), "answers": numbers})
    return sequences


def _grouped(whole: str, answers: list[Answer], is_trained: list[bool]) -> list[Sequence]:
    """Put each answer into the longest text that begins as the answer's own turn does. There is at least one sequence,
    even if no answer is trained on."""
    sequences: list[Sequence] = []
    text = whole
    left = answers
    while True:
        kept = []
        others = []
        for answer in left:
            if text.startswith(answer.text):
                kept.append(answer)
            else:
                others.append(answer)
        if kept:
            sequences.append(Sequence(text, kept))
        left = others
        needed = [answer for answer in left if is_trained[answer.number] or not sequences]
        if not needed:
            return sequences[::-1]
        text = needed[-1].text


def _pieces(sequence: Sequence) -> list[tuple[str, bool]]:
    """Split a sequence into (text, is trained on)."""
    pieces = []
    place = 0
    for answer in sequence.answers:
        stop = len(answer.text)
        pieces += [(sequence.text[place : answer.start], False), (sequence.text[answer.start : stop], True)]
        place = stop
    return [*pieces, (sequence.text[place:], False)]


def _answer(template: ChatTemplate, messages: list[dict[str, Any]], place: int, number: int, end: str) -> Answer:
    """Find the answer at `place` of the conversation in its own turn. `end` is the token that usually ends a turn."""
    marked = template.render(messages[: place + 1])
    text = without_marks(marked)
    marks = _marks(marked)
    prompt = _prompt(template, messages[:place])
    if prompt is not None and text.startswith(prompt):
        start = max(len(prompt), _first_mark(marks, len(prompt), number))
    elif marks and (prompt is None or not place):  # nobody asks for an answer that has no question
        start = marks[-1].start
    elif prompt is None:
        raise Refused(f"has no prompt for answer {number}, and no generation marks around it")
    else:
        start = len(prompt)
        text = _continued(template, prompt, text, messages[: place + 1], number, end)
    stop = _stop(template, text, start, end)
    if not stop:
        raise Refused(f"ends answer {number} with no control token")
    return Answer(number, text[:stop], start)


class Mark(NamedTuple):
    """Places of a `generation` block in a text without marks."""

    start: int
    stop: int


def _marks(marked: str) -> list[Mark]:
    marks = []
    place = 0
    for number, part in enumerate(re.split(f"{START}|{STOP}", marked)):
        if number % 2:
            marks.append(Mark(place, place + len(part)))
        place += len(part)
    return marks


def _first_mark(marks: list[Mark], prompt: int, number: int) -> int:
    """Return where the first block that reaches beyond the prompt begins; 0 for a template without blocks."""
    for mark in marks:
        if mark.stop > prompt:
            return mark.start
    if marks:
        raise Refused(f"has generation blocks, but none around answer {number}")
    return 0


def _prompt(template: ChatTemplate, messages: list[dict[str, Any]]) -> str | None:
    """Render the prompt of an answer; None if the template refuses it."""
    try:
        return without_marks(template.render(messages, add_generation_prompt=True))
    except Refused:
        return None


def _continued(
    template: ChatTemplate, prompt: str, rendered: str, messages: list[dict[str, Any]], number: int, end: str
) -> str:
    """Return the prompt of the last message and that answer behind it, although `rendered`, the conversation as the
    template writes it, does not begin with the prompt.

    The prompt may begin a thought, which the answer's message continues and the rendering leaves out; or it may hold an
    empty thought that is closed, behind which the answer stands.
    """
    before = without_marks(template.render(messages[:-1]))
    if not rendered.startswith(before):
        return _behind_other_turns(template, prompt, rendered, messages[-1], number, end)
    same = _shared_length(prompt, rendered)
    if "<" in prompt[prompt.rfind(">", 0, same) + 1 : same]:  # two tags that begin alike
        same = prompt.rindex("<", 0, same)
    opening = prompt[same:]
    content = messages[-1]["content"].strip()
    begins = opening.strip()
    stop = _stop(template, rendered, same, end)
    token = _last_control(template, rendered[same:stop])
    shown = rendered[same : stop - len(token)]
    is_shown = content.endswith(shown.strip()) or shown.rstrip().endswith(content)
    continues = bool(begins) and content.startswith(begins)
    if not is_shown or not (continues or EMPTY_THOUGHT.fullmatch(opening)):
        visible = prompt[len(before) :].replace(BREAK, "")
        raise Refused(
            f"ends the prompt of answer {number} with {visible!r}, which that answer does not continue: begin its text "
            "as the prompt ends, or choose another template or --template_option"
        )
    rest = content.removeprefix(begins).lstrip() if continues else content
    space = shown[len(shown.rstrip()) :]
    return prompt + rest + space + token


def _behind_other_turns(
    template: ChatTemplate, prompt: str, rendered: str, message: dict[str, Any], number: int, end: str
) -> str:
    """Return the prompt and the answer behind it, as `rendered` has it behind turns that it writes in another way: some
    templates write the system message, or thoughts, depending on who speaks last."""
    content = message["content"].strip()
    stop = _stop(template, rendered, 0, end)
    token = _last_control(template, rendered[:stop])
    place = -1
    if stop and content and "tool_calls" not in message:
        place = rendered.rfind(content, 0, stop - len(token))
    header = _behind_controls(template, prompt)
    shown = _behind_controls(template, rendered[: max(place, 0)])
    if place < 0 or not shown.startswith(header):
        raise Refused(f"writes the turns before answer {number} in another way than in its prompt; choose another one")
    return prompt + shown.removeprefix(header) + rendered[place:stop]


def _last_control(template: ChatTemplate, text: str) -> str:
    """Return the last control token in a text; empty if there is none."""
    controls = template.controls_in(text)
    return controls[-1] if controls else ""


def _behind_controls(template: ChatTemplate, text: str) -> str:
    """Return what follows the last control token."""
    token = _last_control(template, text)
    if not token:
        return text
    return text[text.rindex(token) + len(token) :]


def _stop(template: ChatTemplate, text: str, start: int, end: str) -> int:
    """Return the place behind the token that ends the answer from `start` on: the usual one or, without it, the last
    control token (of a call). 0 if there is no control token."""
    token = end
    if not end or end not in text[start:]:
        token = _last_control(template, text[start:])
    if not token:
        return 0
    return text.rindex(token) + len(token)


def _end_of_turn(template: ChatTemplate) -> str:
    """Return the control token that ends an answer, whether or not another turn follows; empty if there is none."""
    try:
        last = without_marks(template.render([QUESTION, ANSWER]))
        earlier = without_marks(template.render([QUESTION, ANSWER, QUESTION]))
    except Refused:
        return ""
    place = last.rfind(ANSWER["content"])
    in_both = last[place : _shared_length(last, earlier)] if place >= 0 else ""
    if controls := template.controls_in(in_both):
        return controls[-1]
    following = template.controls_in(last[place:])
    return following[0] if following else ""


def _shared_length(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    same = 0
    most = min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[:middle] == other[:middle]:
            same = middle
        else:
            most = middle - 1
    return same
