"""A stranger's chat template sees the conversation, its tokens and the date; it reads nothing else and it ends: by
limits of its process."""

import gc
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ringformer.data import load_tokenizer
from ringformer.data.chats import template_worker, tokenizer_template
from ringformer.data.chats.templates import Template, load_template
from tests.data.chat_samples import chat, llama3

SECRET = "hunter2-of-the-environment"
TURN = "{% for m in messages %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return llama3(tmp_path_factory.mktemp("t"))


def template_of(folder, template: str) -> Template:
    """The template that says the answers and then ends in `template`."""
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TURN + template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_template("tokenizer", load_tokenizer(str(folder)))


def rendered(folder, template: str) -> str:
    """What it makes of an answer."""
    return "".join(segment.text for segment in template_of(folder, template)(chat("q", "a")[1:]))


DOORS = [
    # Through the attributes of whatever is there,
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ lipsum['__globals__']['os'].environ }}",
    "{{ (lipsum|attr('__globals__')).os.environ }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ joiner.__init__.__globals__.os.environ }}",
    "{{ namespace.__init__.__globals__.os.environ }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ strftime_now.__globals__.sys.modules.os.environ }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.func_globals }}",
    "{% macro f() %}{{ caller.__globals__ }}{% endmacro %}{% call f() %}{% endcall %}",
    "{% macro f() %}{% endmacro %}{{ f._environment.globals }}{{ f._func.__globals__ }}",
    "{% for m in messages %}{{ loop._iterable }}{{ loop._recurse.__globals__ }}{% endfor %}",
    "{{ dict.__subclasses__() }}",
    "{{ dict.mro()[1].__subclasses__() }}",
    "{{ (dict|attr('mro'))()[1].__subclasses__() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    # through filters that take the name of one,
    "{{ [lipsum]|map(attribute='__globals__')|list }}",
    "{{ [lipsum]|map('attr', '__globals__')|list }}",
    "{{ [lipsum]|groupby('__globals__')|list }}",
    "{{ [lipsum]|sort(attribute='__globals__.os.environ')|list }}",
    "{{ [lipsum]|selectattr('__globals__')|list }}",
    "{{ [lipsum]|sum(attribute='__globals__.os.environ', start=dict()) }}",
    # through format strings, however they come by the method (3.1.5: by attr),
    "{{ '{0.__globals__[os].environ}'.format(lipsum) }}",
    "{{ '{a.__globals__[os].environ}'.format_map({'a': lipsum}) }}",
    "{{ ('{0.__globals__[os].environ}'|attr('format'))(lipsum) }}",
    "{{ ('{a.__globals__[os].environ}'|attr('format_map'))({'a': lipsum}) }}",
    "{{ (['{0.__globals__[os].environ}']|map(attribute='format')|first)(lipsum) }}",
    "{% set f = '{0.__globals__[os].environ}'.format %}{{ f(lipsum) }}",
    "{% macro f(g) %}{{ g(lipsum) }}{% endmacro %}{{ f('{0.__globals__[os].environ}'.format) }}",
    "{{ '%(a)s' | format(a=lipsum.__globals__) }}",
    # and from files.
    "{% include 'FILE' %}",
    "{% import 'FILE' as x %}{{ x }}",
    "{% extends 'FILE' %}",
    "{{ cycler.__init__.__globals__.os.popen('cat FILE').read() }}",
    "{{ get_flashed_messages.__globals__ }}{{ open('FILE').read() }}",
]


@pytest.mark.parametrize("template", DOORS)
def test_no_template_reads_the_environment_or_a_file(folder, tmp_path, template, monkeypatch):
    monkeypatch.setenv("RINGFORMER_TEST_TOKEN", SECRET)
    (tmp_path / "file").write_text(SECRET)
    assert SECRET in str(os.environ)
    try:
        text = rendered(folder, template.replace("FILE", str(tmp_path / "file")))
    except ValueError as error:
        assert "the chat template of tokenizer" in str(error)
        text = str(error)
    assert SECRET not in text and "__builtins__" not in text.replace(template, "") and "<class" not in text


FAULTS = {
    "{{ 1 / messages|length - 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ messages[0].content + 1 }}": "TypeError",
    "{{ messages[7].content }}": "no element 7",
    "{{ raise_exception('roles must alternate') }}": "refuses this: roles must alternate",
    "{% include 'x' %}": "no loader for this environment",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{% for x in range(10**9) %}{% endfor %}": "OverflowError",
}


@pytest.mark.parametrize(("template", "message"), FAULTS.items())
def test_a_template_that_fails_is_named(folder, template, message):
    with pytest.raises(
        ValueError,
        match=rf"the chat template of tokenizer \S+ refuses this: .*{re.escape(message)}|"
        rf"the chat template of tokenizer \S+ {re.escape(message)}",
    ):
        rendered(folder, template)


LONG = "('abcdefgh' * 60000)"
ENDLESS = {
    # A constant is computed when the template is compiled.
    "a constant power": "{{ 9 ** (9 ** 9) }}",
    "a constant power, its digits": "{{ (7 ** 9999999) | string | length }}",
    "a constant power in a condition": "{% if 3 ** 99999999 > 1 %}x{% endif %}",
    "a power of what is given": "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over lists": "{% set n = range(9999)|list %}{% for a in n %}{% for b in n %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for a in range(99999) recursive %}{% if loop.depth < 3 %}{{ loop(range(99999)) }}{% endif %}"
    "{% endfor %}",
    "nested filters": f"{{{{ {LONG} | replace('', 'abcdefgh' * 99) | upper | lower | wordcount }}}}",
    "filters in filters": "{% set n = range(9999)|list %}{% for a in n %}{{ n | map('string') | join | length }}"
    "{{ n | sort(reverse=true) | map('string') | unique | list | length }}{% endfor %}",
    "a filter that searches": f"{{{{ {LONG} | wordwrap(1) | length }}}}{{{{ ('<' * 400000) | striptags | length }}}}",
    "sums of lists": "{% set n = range(9999) | batch(1) | list %}{{ n | sum(start=[]) | length }}" * 20,
    "tojson": "{% set n = range(9999)|list %}{% for a in n %}{{ (n | tojson(indent=4)) | length }}{% endfor %}",
    "tojson of a constant": "{{ ([[[0] * 999] * 999] * 999) | tojson | length }}",
    "divisibility": "{{ (2 ** 9999999) % (3 ** 5999999) }}",
}
LARGE = {
    "a constant": "{{ ('a' * 2 ** 31) | length }}",
    "a list": "{% set n = range(9999) | list * 99999 %}{{ n | length }}",
    "format": "{{ '%2000000000d' | format(messages | length) | length }}",
    "center": "{{ 'a' | center(2000000000) | length }}",
    "indent": "{{ ('a\n' * 99999) | indent(99999) | length }}",
    "tojson": "{{ [[0] * 9999] | tojson(indent=999999) | length }}",
    "doubling": "{% set s = namespace(a='a') %}{% for i in range(99) %}{% set s.a = s.a ~ s.a %}{% endfor %}",
    "joined": "{% set s = ['a' * 999999] * 9999 %}{{ s | join | length }}",
    "output": "{{ 'a' * 2 ** 31 }}",
}
WORDY = {
    "a constant": "{{ 'a' * 2000000 }}",
    "a loop": "{% for a in range(1001) %}{{ 'a' * 1000 }}{% endfor %}",
    "after each prefix": "{{ 'a' * 1000001 }}",
}


def workers() -> set[int]:
    """The processes of templates that this one has, dead ones that nobody waited for too."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and (
                fields[0] == "Z" or b"template_worker" in (path / "cmdline").read_bytes()
            ):
                found.add(int(path.name))
    return found


@pytest.mark.usual("a constant power in a condition")
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_ends(folder, template, monkeypatch):
    gc.collect()
    before = workers()
    monkeypatch.setattr(tokenizer_template, "SECONDS", 0.3)
    monkeypatch.setattr(tokenizer_template, "MEMORY", 2**36)
    with pytest.raises(ValueError, match=r"the chat template of tokenizer .* takes more than 0\.3 s (to|for)"):
        rendered(folder, template)
    gc.collect()
    assert workers() <= before


@pytest.mark.slow
@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_a_template_of_much_memory_ends(folder, template, monkeypatch):
    gc.collect()
    before = workers()
    monkeypatch.setattr(tokenizer_template, "SECONDS", 30)
    monkeypatch.setattr(tokenizer_template, "MEMORY", 2**27)
    with pytest.raises(
        ValueError, match=r"the chat template of tokenizer .* takes more than 0.125 GiB of memory (to|for)"
    ):
        rendered(folder, template)
    gc.collect()
    assert workers() <= before


@pytest.mark.parametrize("template", WORDY.values(), ids=WORDY)
def test_a_template_of_much_output_ends(folder, template):
    with pytest.raises(
        ValueError, match=r"the chat template of tokenizer .* makes more than 1,000,000 characters besides"
    ):
        rendered(folder, template)


def test_the_limits_are_what_they_are_said_to_be(folder):
    template = "{% if messages[0].content == 'a' %}{{ ('a' * 2 ** 30) | length }}{% endif %}"
    with pytest.raises(ValueError, match="takes more than 1 GiB of memory for a conversation"):
        rendered(folder, template)
    rendered(folder, template.replace("2 ** 30", "2 ** 29"))
    assert (tokenizer_template.SECONDS, tokenizer_template.OUTPUT) == (2, 1_000_000)


def test_the_limits_are_those_of_one_conversation_and_grow_with_it(folder):
    """Of memory and output; a conversation of a million characters is one that this trains on."""
    (assistant,) = chat("q", "a")[1:]
    render = template_of(folder, "{% for i in range(2000) %}{% endfor %}")
    long = render([assistant._replace(content="é🙂" * 1_500_000)])
    assert sum(len(segment.text) for segment in long) == 3_000_000 + len("<|eot_id|>")
    results = render.render_all([[assistant]] * 300)
    assert len(results) == 300 and all(result == results[0] for result in results)


def test_one_conversation_over_the_limit_leaves_the_others(folder, monkeypatch):
    monkeypatch.setattr(tokenizer_template, "SECONDS", 0.5)
    loop = "{% if 'slow' in messages[0].content %}{{ 9 ** (messages | length * 99999999) }}{% endif %}"
    render = template_of(folder, loop)
    (assistant,) = chat("q", "a")[1:]
    texts = ["a", "b", "slow", "c", "slow", "d"]
    results = render.render_all([[assistant._replace(content=text)] for text in texts])
    for text, result in zip(texts, results, strict=True):
        if text == "slow":
            assert "takes more than 0.5 s for a conversation" in str(result)
        else:
            assert [segment.text for segment in result[-1].segments] == [text, "<|eot_id|>"]


PARENT = """
import os, sys, time
from ringformer.data import load_tokenizer
from ringformer.data.chats.conversations import Message
from ringformer.data.chats.templates import Template, load_template
render = load_template("tokenizer", load_tokenizer({folder!r}))
child = os.fork()
if not child:  # has a process of its own, and does not end its parent's
    assert len(render([Message("assistant", "a")])) == 2
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert len(render([Message("assistant", "b")])) == 2
if not os.fork():  # holds the pipes of the worker, beyond the parent's end
    os.close(1), os.close(2)
    time.sleep(20)
    os._exit(0)
print(render.render_all._worker._process.pid, flush=True)
{end}
"""


@pytest.mark.usual("render([Message('assistant', 'slow')])")
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()", "render([Message('assistant', 'slow')])"])
def test_no_process_outlives_its_parent_nor_a_fork_shares_it(folder, end):
    template_of(folder, "{% if messages[0].content == 'slow' %}{{ 9 ** (messages | length * 99999999) }}{% endif %}")
    program = PARENT.format(folder=str(folder), end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ("takes more than 2 s for a conversation" in done.stderr) == ("slow" in end)


ANSWERS = (
    '[{"parts": [["a", true, false]], "answers": [1]}]',  # there is one answer, number 0
    '[{"parts": [["a", true, false]], "answers": [-1]}]',
    '[{"parts": [["a", true, false]], "answers": []}]',
    '[{"parts": [["a", true, false]], "answers": [0]}, {"parts": [["a", true, false]], "answers": [0]}]',
    "[]",
    '[["a", true, true]]',
    '[["a", 1, false]]',
    "[[7, true, false]]",
    "[7]",
    "7",
    "null",
    "{",
    "[" * 9999,
)


def test_a_process_that_answers_something_else_is_not_believed(folder, monkeypatch, tmp_path):
    """As one would that a template has taken over."""
    monkeypatch.setattr(tokenizer_template, "EXIT_SECONDS", 0.05)
    for answer in (
        *(repr(f"{answer}\n".encode()) for answer in ANSWERS),
        f"b' ' * {64 * (tokenizer_template.OUTPUT + 1)}",  # more than is read of a line
    ):
        program = f"""
import sys
def answer(content):
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
answer(b'""\\n')
answer({answer})
sys.stdin.buffer.read()
"""
        (tmp_path / "worker.py").write_text(program)
        monkeypatch.setattr(template_worker, "__file__", str(tmp_path / "worker.py"))
        with pytest.raises(ValueError, match="broke its process, which sent an invalid answer"):
            rendered(folder, "")


def interrupt_when_a_template_computes():
    """Ctrl-C, as soon as a child of this process computes for three tenths of a second: then this one waits for it."""
    before: dict[Path, int] = {}
    while True:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended meanwhile
                _, parent, *numbers = stat.read_text().rpartition(")")[2].split()
                if int(parent) == os.getpid():
                    spent = int(numbers[9]) - before.setdefault(stat, int(numbers[9]))
                    if spent > 0.3 * os.sysconf("SC_CLK_TCK"):
                        return os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)


def test_ctrl_c_while_a_template_runs_leaves_a_template_that_works(folder):
    render = template_of(
        folder, "{% if messages[0].content == 'slow' %}{{ 9 ** (messages | length * 99999999) }}{% endif %}"
    )
    (assistant,) = chat("q", "a")[1:]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it
    threading.Thread(target=interrupt_when_a_template_computes, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            render([assistant._replace(content="slow")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert [segment.text for segment in render([assistant])] == ["a", "<|eot_id|>"]


def test_tojson_is_that_of_transformers(folder):
    values = "{'é': [1, 2], 'a': '<'}"
    for options in ("", "indent=2", "ensure_ascii=true", "separators=[',', ':'], sort_keys=true"):
        keywords = eval(f"dict({options.replace('true', 'True')})")
        expected = json.dumps({"é": [1, 2], "a": "<"}, **{"ensure_ascii": False} | keywords)
        assert rendered(folder, f"{{{{ {values} | tojson({options}) }}}}").endswith(f"<|eot_id|>{expected}")


def test_an_argument_may_have_any_name(folder):
    macro = "{% macro f(context, obj) %}{{ context }}{{ obj }}{% endmacro %}{{ f(context=1, obj=2) }}"
    assert rendered(folder, macro).endswith("<|eot_id|>12")


@pytest.mark.parametrize("old", ["3.1.5", "3.0.3", "2.11.3", "3.1"])
def test_an_older_jinja_is_refused(folder, old, monkeypatch):
    """Before it is given the template; who needs none may keep it."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"jinja2": old}[name])
    with pytest.raises(ValueError, match=rf"jinja2 {old} .* pip install -U 'jinja2>=3\.1\.6'"):
        rendered(folder, "")
    load_template("llama3", load_tokenizer(str(folder)))
    for new in ("3.1.6", "3.2.0", "3.10", "4.0.0rc1"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, new=new: new)
        rendered(folder, "")


@pytest.mark.parametrize(
    "source",
    [7, {"default": "x"}, ["default"], [{"name": "default"}], [{"template": "x"}], [dict(name="default", template=7)]],
)
def test_a_template_of_another_type_is_none(folder, source):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
    with pytest.raises(ValueError, match="has no chat template"):
        load_template("tokenizer", load_tokenizer(str(folder)))
