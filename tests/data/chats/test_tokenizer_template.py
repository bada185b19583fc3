"""A stranger's chat template sees the conversation, its tokens and the date; it reads nothing else and it ends."""

import importlib.metadata
import json
import os
import re

import pytest

from ringformer.data import load_tokenizer
from ringformer.data.chats import tokenizer_template
from ringformer.data.chats.templates import load_template
from tests.data.chat_samples import chat, llama3

SECRET = "hunter2-of-the-environment"
TURN = "{% for m in messages %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return llama3(tmp_path_factory.mktemp("t"))


def rendered(folder, template: str) -> str:
    """What a template that ends in `template` makes of an answer."""
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TURN + template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    render = load_template("tokenizer", load_tokenizer(str(folder)))
    return "".join(segment.text for segment in render(chat("q", "a")[1:]))


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
    with pytest.raises(ValueError, match=rf"the chat template of tokenizer \S+ refuses this: .*{re.escape(message)}|"
                                         rf"the chat template of tokenizer \S+ {re.escape(message)}"):  # fmt: skip
        rendered(folder, template)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over lists": "{% set n = range(9999)|list %}{% for a in n %}{% for b in n %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for a in range(99999) recursive %}{% if loop.depth < 3 %}{{ loop(range(99999)) }}{% endif %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_ends(folder, template, monkeypatch):
    monkeypatch.setattr(tokenizer_template, "MOST_STEPS", 20_000)
    with pytest.raises(ValueError, match="takes more than 20,000 steps"):
        rendered(folder, template)


def test_the_steps_are_those_of_one_conversation(folder, tmp_path, monkeypatch):
    """And a loop knows its length and its last turn as ever."""
    monkeypatch.setattr(tokenizer_template, "MOST_STEPS", 40)
    loop = "{% for x in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ' ' if not loop.last }}{% endfor %}"
    for _ in range(5):
        assert rendered(folder, loop).endswith("1/3 2/3 3/3")
    render = load_template("tokenizer", load_tokenizer(str(llama3(tmp_path / "t"))))
    for _ in range(20):
        render(chat("q", "a", "r", "b"))
    with pytest.raises(ValueError, match="takes more than 40 steps"):
        render(chat(*"qa" * 50))


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
