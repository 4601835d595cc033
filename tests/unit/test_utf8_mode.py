"""In a locale of another encoding files are read as UTF-8, and nothing that is printed
raises an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.types import Message, Prompt

ASCII_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
"""Python then takes ASCII for files and streams; a test may count on no other locale to
be installed."""
TEMPLATE = """{{ '<｜begin▁of▁sentence｜>' }}{% for message in messages %}
{{- '<｜User｜>' if message.role == 'user' else '<｜Assistant｜>' }}{{ message.content }}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
RENDER = """
import json, locale, sys
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.types import Message, Prompt
prompt = Prompt(messages=(Message("user", "Hi"),))
ids = load_renderer(sys.argv[1], 512).render_first(prompt)
print(json.dumps({"encoding": locale.getpreferredencoding(False), "ids": ids}))
"""
PRINT = """
import sys
from invrl.cli import main
def overview():
    print("a full-width \\uff5c, a lone surrogate \\ud800")
    print("an umlaut \\xe4", file=sys.stderr)
main._print_overview = overview
sys.exit(main.main())
"""


def run_in_ascii_locale(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **ASCII_LOCALE},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.fixture
def full_width_model(tmp_path: Path) -> Path:
    """A model whose template and special tokens have DeepSeek's full-width
    characters."""
    folder = make_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8")
        content = json.loads(text.replace("<|im_start|>", "<｜User｜>"))
        (folder / name).write_text(
            json.dumps(content, ensure_ascii=False), encoding="utf-8"
        )
    return folder


def test_a_template_of_full_width_characters_becomes_the_same_ids(
    full_width_model: Path,
) -> None:
    process = run_in_ascii_locale("-c", RENDER, str(full_width_model))
    assert process.returncode == 0, process.stderr
    rendered = json.loads(process.stdout)
    assert rendered["encoding"].lower() != "utf-8", "else the test shows nothing"
    renderer = load_renderer(str(full_width_model), 512)
    assert rendered["ids"] == renderer.render_first(
        Prompt(messages=(Message("user", "Hi"),))
    )
    assert renderer.decode(rendered["ids"]).endswith("<｜User｜>Hi<｜Assistant｜>")


def test_a_command_runs_in_utf8_mode_and_prints_what_no_encoding_has() -> None:
    process = run_in_ascii_locale("-c", PRINT, "--help")
    assert process.returncode == 0, process.stderr
    assert process.stdout == "a full-width ｜, a lone surrogate \\ud800\n"
    assert process.stderr == "an umlaut ä\n"


def test_a_command_that_cannot_have_utf8_mode_runs_all_the_same() -> None:
    """-I ignores the environment, the mode too: it must not start again and again."""
    process = run_in_ascii_locale(
        "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{PRINT}", "--help"
    )
    assert process.returncode == 0, process.stderr
