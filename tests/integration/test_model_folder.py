"""Our reading of a model folder against transformers' own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.types import Message, Prompt

CONVERSATIONS = (
    [Message("user", "What is 12*13?")],
    [
        Message("system", " Be brief. "),
        Message("user", "x"),
        Message("assistant", "y\n"),
        Message("user", ""),
    ],
    [Message("user", "ünïcödé 漢字 🙂 <|im_end|> 'quotes' & <b>")],
)


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'user' %}\n"
        "{{ m.content | tojson }}{% endif %}\n{% endfor %}{{ eos_token }}",
    ],
)
def test_rendered_text_and_ids_equal_those_of_transformers(
    tiny_model: Path, tmp_path: Path, template: str
):
    import shutil

    from transformers import AutoTokenizer

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    # transformers takes a control token in a content for one.
    ours = load_renderer(str(folder), 512, special_tokens_in_content="control")
    for conversation in CONVERSATIONS:
        plain = [{"role": m.role, "content": m.content} for m in conversation]
        expected = theirs.apply_chat_template(
            plain, tokenize=True, add_generation_prompt=True
        )
        assert ours.render_first(Prompt(messages=tuple(conversation))) == list(
            expected["input_ids"]
        )
    assert ours.end_ids == {theirs.eos_token_id}
    ids = list(range(512))
    assert ours._tokenizer.decode(ids, special=False) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_gateway_process_needs_neither_torch_nor_transformers(tiny_model: Path):
    import subprocess
    import sys

    program = (
        "import json, sys; from invrl.gateway.server.processes import gateway_server; "
        "from invrl.gateway.server.routes import app; "
        "from invrl.gateway.rendering.loading import load_renderer; "
        f"load_renderer({str(tiny_model)!r}, 512); "
        "print(json.dumps([name for name in ('torch', 'transformers') if name in sys.modules]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout) == []
