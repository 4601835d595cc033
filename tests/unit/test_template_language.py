"""Chat templates are rendered as transformers renders them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from invrl.gateway.rendering.chat_template import SHIPPED_TEMPLATES
from invrl.gateway.rendering.template_language import render_template

CALL = {
    "id": "c1",
    "type": "function",
    "function": {
        "name": "add",
        "arguments": {"b": "ü<&>'", "a": [1, 2.5]},
    },
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "How much is 1 + 2?\n"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
        "reasoning_content": "I add.",
    },
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
    {"role": "assistant", "content": "<think>x</think>It is 3."},
    {"role": "user", "content": "{{ no template }}"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Ädds",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
TEMPLATES = {
    "blocks and whitespace": """
        {%- for message in messages %}
            {% if loop.first %}first{% endif %}
          {{- message.role ~ ': ' ~ message.content | trim }}
    {% endfor %}
    {# a comment #}
    end
""",
    "loop controls": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}"
    "{{ messages[2].tool_calls[0] | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}ü"
    "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
    "generation with trimmed marks": "x {%- generation -%} {{ messages[4].content }} {%- endgeneration -%} y",
    "nothing generated": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "namespace and macro": "{% set ns = namespace(n=0) %}{% macro show(m) %}<{{ m.role }}>{% endmacro %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ show(m) }}{% endfor %}{{ ns.n }}",
    "what may be missing": "{{ documents is none }}{{ absent is defined }}{{ absent }}"
    "{{ messages[0].tool_calls is defined }}{{ bos_token }}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%d %b %Y') }}",
    "string methods": "{{ messages[4].content.split('</think>')[-1].lstrip('\\n') }}{{ 'a' * 3 }}"
    "{{ messages | length }}{{ messages[::-1][0].content | upper }}",
}
TEMPLATES |= {
    name: path.read_text(encoding="utf-8") for name, path in SHIPPED_TEMPLATES.items()
}
VARIABLES = {
    "bos_token": "<s>",
    "add_generation_prompt": True,
    "strftime_now": lambda form: f"<{form}>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_renders_as_in_transformers(name: str) -> None:
    source = TEMPLATES[name]
    has_blocks = "generation %}" in source or "generation -%}" in source
    [expected], blocks = render_jinja_template(
        conversations=[MESSAGES],
        tools=TOOLS,
        chat_template=source,
        return_assistant_tokens_mask=has_blocks,
        **VARIABLES,
    )
    text, found = render_template(
        source, {"messages": MESSAGES, "tools": TOOLS, "documents": None, **VARIABLES}
    )
    assert text == expected
    assert found == [tuple(block) for block in (blocks[0] if has_blocks else [])]
    assert bool(found) == has_blocks


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no tools here') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for m in messages %}",
        "{{ messages | no_filter }}",
        "{{ absent.content }}",
    ],
)
def test_template_is_refused_as_in_transformers(source: str) -> None:
    with pytest.raises(jinja2.TemplateError) as theirs:
        render_jinja_template(conversations=[MESSAGES], chat_template=source)
    with pytest.raises(type(theirs.value)) as ours:
        render_template(source, {"messages": MESSAGES})
    assert str(ours.value) == str(theirs.value)


def test_threads_that_render_one_template_keep_their_blocks_apart() -> None:
    def blocks(size: int) -> list[tuple[int, int]]:
        messages = [{"role": "assistant", "content": "x" * size}] * 40
        _, found = render_template(TEMPLATES["generation"], {"messages": messages})
        return found

    sizes = list(range(1, 60))
    with ThreadPoolExecutor(8) as threads:
        for size, found in zip(sizes, threads.map(blocks, sizes), strict=True):
            assert found == [
                (at * (size + 1), (at + 1) * (size + 1)) for at in range(40)
            ]
