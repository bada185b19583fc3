"""What a prompt of RULER is made of, read from its text alone; the same for the original's prompts and for ours."""

import re
from collections import Counter
from itertools import pairwise

NEEDLE = re.compile(r"One of the special magic \w+ for (\S[^\n:]*?) is: ([\w-]+)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
BORDERS = (
    ("afterwards.\n", "\nWhat "),
    ("following text.\n\n", "\nQuestion:"),
    ("most often.\n", "\nQuestion:"),
    ("coded words. ", "\nQuestion:"),
    ("are given documents.\n\n", "\n\nAnswer the question based"),
)
"""What stands before and behind the context of a task."""


def borders(text):
    ((begin, end),) = [
        (text.index(before) + len(before), text.index(behind, text.index(before)))
        for before, behind in BORDERS
        if before in text[:400] and behind in text
    ][:1]
    return begin, end


def context_of(text):
    """The text between a task's instruction and its question, of the first task in `text`."""
    begin, end = borders(text)
    return text[begin:end]


def frame(text, *drawn):
    """A text without its context, and with a mark for each of the patterns of what is drawn."""
    begin, end = borders(text)
    text = text[:begin] + "<context>" + text[end:]
    for pattern in drawn:
        text = re.sub(pattern, "<drawn>", text)
    return text


def kind_of(value):
    return "uuid" if UUID.fullmatch(value) else "number" if re.fullmatch(r"[1-9]\d{6}", value) else "word"


def niah(question, prefix):
    context = context_of(question)
    found = NEEDLE.findall(context)
    keys = re.search(r"\nWhat .* for (.*) mentioned", question)[1]
    assert f" for {keys} mentioned" in prefix
    lines = Counter(NEEDLE.sub("<needle>", line) for line in context.split("\n")).keys()
    haystack = "lines" if lines <= {"<needle>", NOISE} else "text"
    asked = re.split(", and |, ", keys)
    return (
        frame(question, r"(?<= for ).*(?= mentioned)"),
        re.sub(r"(?<= for ).*(?= mentioned)", "<drawn>", prefix),
        haystack,
        lines if haystack == "lines" else None,
        {(kind_of(key), kind_of(value)) for key, value in found},
        len(found) if haystack == "text" else None,
        len({key for key, _ in found}) if haystack == "text" else None,
        len(asked),
        keys.count(", and "),
        {sum(key == name for key, _ in found) for name in asked},
    )


def vt(question, prefix):
    """Frame, length of the names, and lines that are no assignment, of the example and of what is asked."""
    found = []
    example, asked = question.split("\n\nMemorize")
    for part in (example, "Memorize" + asked + prefix):
        lines = context_of(part).split("\n")
        chain = [line for line in lines if line.startswith("VAR")]
        names = [re.match(r"VAR (\w+) = ", line)[1] for line in chain]
        value = re.fullmatch(r"VAR \w+ = (\d{5})", chain[0])[1]
        assert chain[1:] == [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
        assert part.count(value) == 3
        found += [frame(part, value, r"\b[A-Z]{3,}\b(?<!VAR)"), [len(name) for name in names], set(lines) - set(chain)]
    assert example.split()[-5:] == re.findall(r"VAR (\w+) = ", example)
    return found, len(context_of(example).split("\n"))


def cwe(question, prefix):
    """Frames, how often words stand in the example and in the list; the example's answer is its ten most common."""
    example, asked = question[: question.rindex("Below is")], question[question.rindex("Below is") :] + prefix
    found = []
    for part in (example, asked):
        words = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", context_of(part))
        assert [int(number) for number, _ in words] == list(range(1, len(words) + 1))
        counts = Counter(word for _, word in words)
        found += [frame(part, r"(?<=list are: ).*"), sorted(set(counts.values())), len(counts) if not found else None]
        found.append(sum(often == max(counts.values()) for often in counts.values()))
        if part is example:
            answer = re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", part[part.index("list are: ") :])
            assert set(answer) == {word for word, _ in counts.most_common(10)} and len(answer) == 10
    return found


def fwe(question, prefix):
    words = context_of(question).split(" ")
    counts = Counter(words).most_common()
    return frame(question), prefix, [often for _, often in counts], counts[0][0], {len(w) for w in words if w != "..."}


def qa(question, prefix):
    numbers = [int(n) for n in re.findall(r"(?:^|\n\n)Document (\d+):\n", context_of(question))]
    return frame(question, r"(?<=\n\nQuestion: ).*"), prefix, numbers == list(range(1, len(numbers) + 1))


def facts(task, question, prefix):
    """All of a prompt but what is drawn, and but how many parts its context has."""
    return {"niah": niah, "vt": vt, "cwe": cwe, "fwe": fwe, "qa": qa}[task.split("_")[0]](question, prefix)


def parts(task, question):
    """How many sentences, words or documents a context has, besides what is asked for."""
    context = context_of(question)
    if task == "vt":
        return context_of(question[question.rindex("Memorize and track") :]).count(NOISE)
    if task == "cwe":
        context = context_of(question[question.rindex("Below is") :])
        return len(set(re.findall(r"\d+\. (.+?)(?= \d+\. |$)", context)))
    if task.startswith("niah"):
        lines = context.split("\n")
        return len(lines) - 1 if len(lines) > 1 else len(NEEDLE.sub("", context).split())
    return len(context.split(" ")) if task == "fwe" else len(re.findall(r"(?:^|\n\n)Document \d+:\n", context))


def solve(task, question):
    """The references, from the prompt."""
    if task.startswith("niah"):
        keys = re.split(", and |, ", re.search(r"\nWhat .* for (.*) mentioned", question)[1])
        return [value for key, value in NEEDLE.findall(question) if key in keys]
    if task == "cwe":
        words = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", context_of(question[question.rindex("Below is") :]))
        return [word for word, _ in Counter(words).most_common(10)]
    if task == "fwe":
        (dots, _), *top = Counter(context_of(question).split(" ")).most_common(5)
        assert dots == "..." and top[2][1] > top[3][1]
        return [word for word, _ in top[:3]]
    asked = question[question.rindex("Memorize and track") :]
    known, names = {re.search(r"assigned the value (\d+) in", asked)[1]}, []
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", asked):
        if source in known:
            known.add(name)
            names.append(name)
    return names
