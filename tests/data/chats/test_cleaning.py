"""Each rule does what it says and counts it; code survives the way from HTML."""

import pytest

from ringformer.data.chats.cleaning import Cleaning, to_markdown
from ringformer.data.chats.conversations import Conversation, Message

LONG = "A ring carries blocks of keys and values from rank to rank."


def turns(*pairs):
    return tuple(Message(role, text) for role, text in pairs)


def clean(rules, *conversations):
    cleaning = Cleaning([Conversation(c, f"c{i}") for i, c in enumerate(conversations)], ",".join(rules))
    kept = [conversation.messages for conversation in cleaning]
    return kept, {reason: count for reason, count in cleaning.counts.items() if count}


@pytest.mark.parametrize(
    ("given", "kept", "counts"),
    [
        ("uaua", "uaua", {}),
        ("suaua", "suaua", {}),
        ("aua", "ua", {"turns dropped: before the first question": 1}),
        ("saaua", "sua", {"turns dropped: before the first question": 2}),
        ("uau", "ua", {"turns dropped: a question without an answer": 1}),
        ("uaaua", "ua", {"turns dropped: after two of one speaker, or a system message within": 3}),
        (
            "uauua",
            "ua",
            {
                "turns dropped: after two of one speaker, or a system message within": 2,
                "turns dropped: a question without an answer": 1,
            },
        ),
        ("uasua", "ua", {"turns dropped: after two of one speaker, or a system message within": 3}),
        (
            "aa",
            None,
            {"turns dropped: before the first question": 2, "conversations dropped: no question with an answer": 1},
        ),
        ("", None, {"conversations dropped: no question with an answer": 1}),
    ],
)
def test_turns(given, kept, counts):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    found, counted = clean([], turns(*((roles[letter], str(i)) for i, letter in enumerate(given))))
    assert ["".join(message.role[0] for message in messages) for messages in found] == ([] if kept is None else [kept])
    assert counted == counts
    assert not found or all(message.content in map(str, range(len(given))) for message in found[0])


def test_merge_joins_instead_of_stopping():
    found, counted = clean(
        ["merge"], turns(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    )
    assert found == [turns(("user", "a\n\nb"), ("assistant", "c\n\nd"))]
    assert counted == {"turns merged": 2, "turns dropped: a question without an answer": 1}


HTML = (
    '<div class="markdown prose"><p>Use <code>a_b*c</code> and <strong>this</strong>:</p><pre><div class="bg-black">'
    '<div><span>python</span><button>Copy code</button></div><div><code class="hljs language-python">'
    '<span class="k">def</span> f(x):\n    return x &lt; 1\n\n\n\nf(2)\n</code></div></div></pre>'
    "<ol><li>one_two</li><li>2 * 3 &gt; 1</li></ol><table><tr><th>a</th></tr><tr><td>1</td></tr></table></div>"
)
MARKDOWN = (
    "Use `a_b*c` and **this**:\n\n```python\ndef f(x):\n    return x < 1\n\n\n\nf(2)\n```\n\n"
    "1. one_two\n2. 2 * 3 > 1\n\n| a |\n| --- |\n| 1 |"
)


def test_html_answers_become_markdown_and_nothing_else_does():
    assert to_markdown(HTML) == MARKDOWN
    question, plain = "<p>why is this HTML wrong?</p>", "Write <div> first.\n\n    x = a < b\n\n```\n<p>\n```"
    given = turns(("user", question), ("assistant", HTML), ("user", "b"), ("assistant", plain))
    found, counted = clean(["html"], given)
    assert found == [turns(("user", question), ("assistant", MARKDOWN), ("user", "b"), ("assistant", plain))]
    assert counted == {"answers turned from HTML to markdown": 1}
    assert clean([], given) == ([given], {})


@pytest.mark.parametrize(
    ("rule", "dropped", "kept"),
    [
        ("unprintable", "broken \ufffd\ufffd text \x00\x01", LONG + "\n\tnaïve café 日本語 🙂"),
        ("latin", "日本語で答えます。これは長い文章です。", "Müller: " + LONG + " α"),
        ("short", "yes", LONG),
        ("refusal", "As an AI language model, I cannot say.", "An AI language is Lisp. " + LONG),
        ("refusal", "I’m sorry, but I can’t help with that.", "I am sorry, but it is 4. " + LONG),
    ],
)
def test_filters(rule, dropped, kept):
    conversations = [turns(("user", "Well?"), ("assistant", answer)) for answer in (dropped, kept)]
    assert clean([rule], *conversations) == (conversations[1:], {f"conversations dropped: {rule}": 1})
    assert clean([], *conversations) == (conversations, {})


def test_duplicates_are_found_after_cleaning():
    one = turns(("user", "a"), ("assistant", "b"))
    found, counted = clean(["duplicate"], one, (Message("assistant", "lead"), *one), turns(("user", "a b")), one)
    assert found == [one]
    assert counted["conversations dropped: duplicate"] == 2


def test_an_unknown_rule_lists_the_rules():
    with pytest.raises(ValueError, match="unknown cleaning rule 'htm'; known: html, merge"):
        Cleaning([], "htm")


def test_html_nested_beyond_what_is_read_is_dropped_and_counted():
    deep, fine = (turns(("user", "q"), ("assistant", "<div>" * n + LONG + "</div>" * n)) for n in (2000, 20))
    assert clean(["html"], deep, fine) == (
        [turns(("user", "q"), ("assistant", LONG))],
        {"conversations dropped: an answer of HTML nested too deeply": 1, "answers turned from HTML to markdown": 1},
    )
    assert clean([], deep) == ([deep], {})
