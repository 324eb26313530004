"""Chat templates are strangers' programs: what they may do, what stops them, what they may tell."""

import re
import weakref
from typing import Any

import pytest

from zen_jax import chat_template
from zen_jax.chat_template import ChatTemplate

SECRET = "the owner's secret"
MESSAGES = {"messages": [{"role": "user", "content": SECRET}]}


def rendered(source: str, **variables: Any) -> str:
    """The text of a template that is thrown away at once."""
    template = ChatTemplate(source, cpu_seconds=0.2)
    try:
        return template.render(MESSAGES | variables)
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m['content'] }}{% endfor %}", f"user: {SECRET}"),
        # Blocks leave no line behind, as in transformers.
        ("{% if true %}\n  {% set x = 1 %}\nyes\n{% endif %}\n", "yes\n"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ bos_token }}{{ tools is none }}", "<s>True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_renders_as_checkpoints_expect(source: str, text: str) -> None:
    assert rendered(source, bos_token="<s>", tools=None) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'x' * 900000000 }}", r"memory|0\.2 s"),
        (
            "{% set n = namespace(s='xx') %}{% for i in range(60) %}"
            "{% set n.s = n.s ~ n.s %}{% endfor %}",
            r"memory|0\.2 s",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            r"0\.2 s",
        ),
        (
            "{% set n = namespace(s=[1]) %}{% for i in range(60) %}"
            "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
            r"0\.2 s|memory",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set _ = messages.append(1) %}", "SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include '/etc/passwd' %}", "fails with TypeError"),
        ("{% if %}", r"line 1"),
        ("{{ missing.name }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these .*: roles must alternate"),
        ("{{ raise_exception('odd: ' ~ messages[0].content) }}", "refuses these messages$"),
    ],
)
def test_a_template_that_goes_too_far_is_an_error_that_tells_no_message(
    source: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        rendered(source)
    assert SECRET not in str(caught.value)


def test_a_template_that_is_stopped_can_be_rendered_again() -> None:
    nested = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}ok"
    template = ChatTemplate(nested, cpu_seconds=0.05)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0\.05 s"):
            template.render({"n": 99999})
        assert template.render({"n": 2}) == "ok"
    template.close()
    assert template.render({"n": 2}) == "ok"


BUSY = "{% for i in range(n) %}{% for j in range(1000) %}{% endfor %}{% endfor %}ok"


def test_a_template_that_is_stopped_too_often_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "BUDGET_SECONDS", 0.3)
    now = [0.0]
    template = ChatTemplate(BUSY, cpu_seconds=0.25, clock=lambda: now[0])
    for _ in range(100):  # short ones are free
        assert template.render({"n": 1}) == "ok"
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0\.25 s or"):
            template.render({"n": 99999})
    with pytest.raises(ValueError, match=r"of late; try again in 2 s"):
        template.render({"n": 1})
    now[0] += 2
    assert template.render({"n": 1}) == "ok"
    template.close()


def test_renderings_that_just_pass_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "BUDGET_SECONDS", 0.1)
    template = ChatTemplate(BUSY, cpu_seconds=30, clock=lambda: 0.0)
    with pytest.raises(ValueError, match="of late"):
        for _ in range(20):
            assert template.render({"n": 3000}) == "ok"
    template.close()


def test_a_child_that_something_else_ended_is_replaced() -> None:
    template = ChatTemplate("ok")
    assert template.render({}) == "ok"
    child = template._child
    assert child is not None
    child.process.kill()
    child.process.wait()
    assert template.render({}) == "ok"


def test_the_child_ends_with_its_template() -> None:
    template = ChatTemplate("ok")
    template.render({})
    child = template._child
    assert child is not None
    gone = weakref.ref(template)
    del template
    assert gone() is None
    assert child.process.returncode is not None


def test_a_child_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "WAIT_SECONDS", 0.0)
    source = "{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="no answer"):
        rendered(source)


def test_lone_surrogates_pass_through() -> None:
    assert rendered("{{ text }}", text="a\ud800") == "a\ud800"


def test_long_templates_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape(str(chat_template.MAX_SOURCE))):
        ChatTemplate("x" * (chat_template.MAX_SOURCE + 1))


def test_output_up_to_the_limit_arrives_whole() -> None:
    text = "\N{GRINNING FACE}\0" * (chat_template.MAX_OUTPUT // 2)
    assert ChatTemplate("{{ text }}").render({"text": text}) == text
