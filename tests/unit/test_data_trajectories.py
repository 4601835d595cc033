"""The tokens that a conversation trains, with real tokenizers and their own
templates."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from model_templates import MODELS, NO_LIMIT, renderer_of
from slow_cases import first_quick
from tiny_model import make_tiny_model
from transformers import AutoTokenizer

from invrl.datasets.rows import Dialogue, read_row
from invrl.datasets.trajectories import TokenizedTrajectory, trajectories
from invrl.errors import UnusableRowError
from invrl.gateway.rendering.content_marks import without_marks
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.template_check.template_corpus import CORPUS
from invrl.gateway.types import Prompt


def replies_of(prompt: Prompt) -> tuple[int, ...]:
    return tuple(
        at for at, message in enumerate(prompt.messages) if message.role == "assistant"
    )


def shown(renderer: Renderer, trajectory: TokenizedTrajectory) -> str:
    """The text, each trained stretch in [[ ]]."""
    text = ""
    last = False
    for token, is_trained in zip(
        trajectory.tokens_T.tolist(), trajectory.trained_T.tolist(), strict=True
    ):
        if is_trained != last:
            text += "[[" if is_trained else "]]"
        text += renderer.decode([token])
        last = is_trained
    return text + ("]]" if last else "")


def conversation(*messages: dict[str, object], **fields: object) -> Dialogue:
    [side] = read_row(1, {"messages": list(messages), **fields}, "conversations").sides  # type: ignore[dict-item]
    return side


ASK = {"role": "user", "content": "Hello?"}
REPLY = {"role": "assistant", "content": "Yes."}
MORE = {"role": "user", "content": "And?"}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_only_replies_and_their_end_tokens_are_trained() -> None:
    renderer = renderer_of("smollm2")
    [trajectory] = trajectories(renderer, conversation(ASK, REPLY, MORE, REPLY))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert shown(renderer, trajectory) == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>]]\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>]]"
    )


def test_kept_thinking_makes_one_trajectory_and_dropped_thinking_several() -> None:
    dialogue = conversation(ASK, THOUGHT, MORE, THOUGHT)
    first = "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    second = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    reply = "[[<think>\nHm.\n</think>\n\nYes.<|im_end|>]]"
    kept = renderer_of("qwen3")
    assert [shown(kept, trajectory) for trajectory in trajectories(kept, dialogue)] == [
        first + reply + second + reply
    ]
    dropped = renderer_of("qwen3", keep_thinking=False)
    assert [
        shown(dropped, trajectory) for trajectory in trajectories(dropped, dialogue)
    ] == [
        first + reply,
        f"{first}Yes.<|im_end|>{second}{reply}",
    ]


def test_refused_thinking_is_context_and_not_trained() -> None:
    renderer = renderer_of("qwen3")
    dialogue = conversation(ASK, REPLY, chat_template_kwargs={"enable_thinking": False})
    [trajectory] = trajectories(renderer, dialogue)
    assert shown(renderer, trajectory).endswith(
        "assistant\n<think>\n\n</think>\n\n[[Yes.<|im_end|>]]"
    )


def test_reply_of_weight_0_is_only_context_of_its_trajectory() -> None:
    renderer = renderer_of("llama3.2")
    [trajectory] = trajectories(
        renderer, conversation(ASK, {**REPLY, "weight": 0}, MORE, THOUGHT)
    )
    assert shown(renderer, trajectory).count("[[") == 1
    assert shown(renderer, trajectory).endswith("\n\n[[Yes.<|eot_id|>]]")
    between = conversation(
        ASK, REPLY, MORE, {**REPLY, "content": "No.", "weight": 0}, MORE, REPLY
    )
    [trajectory] = trajectories(renderer, between)
    assert "No.<|eot_id|>" in shown(renderer, trajectory)
    assert shown(renderer, trajectory).count("[[Yes.<|eot_id|>]]") == 2


REFUSED = {
    (
        "qwen3",
        "consecutive replies",
    ),  # it asks for the second reply with the first one's thinking removed
    ("llama3.2", "parallel calls"),
    ("llama3.2", "parallel calls in turn"),
    # DeepSeek's template writes no end of turn behind a single call.
    *(
        ("deepseek-v3", name)
        for name in (
            "call",
            "call without arguments",
            "call cut in its arguments",
            "calls in turn",
            "parallel calls in turn",
            "empty result",
            "thinking between calls",
            "question after thinking between calls",
            "thinking refused, calls",
        )
    ),
}


@pytest.mark.parametrize("keep_thinking", [True, False])
@pytest.mark.parametrize("model", first_quick(MODELS))
def test_each_reply_follows_the_prompt_that_the_gateway_would_send(
    model: str, keep_thinking: bool
) -> None:
    """The whole corpus: a trajectory begins with the ids of a first request, its last
    reply is what the template writes, and a trajectory that goes on says what the
    template says, thinking aside."""
    renderer = renderer_of(model, keep_thinking=keep_thinking)
    refused: set[tuple[str, str]] = set()
    for name, prompt in CORPUS.items():
        places = replies_of(prompt)
        try:
            dialogue_trajectories = trajectories(
                renderer, Dialogue(prompt=prompt, trained=places)
            )
        except UnusableRowError:
            refused.add((model, name))
            continue
        stretches = 0
        for trajectory in dialogue_trajectories:
            starts = [
                at for at in range(len(trajectory.trained_T)) if _begins(trajectory, at)
            ]
            place = places[stretches]
            first = renderer.render_first(
                replace(prompt, messages=prompt.messages[:place])
            )
            assert trajectory.tokens_T[: starts[0]].tolist() == first, name
            stretches += len(starts)
            last = places[stretches - 1]
            whole = renderer.text(
                replace(prompt, messages=prompt.messages[: last + 1]),
                add_generation_prompt=False,
            )
            whole = without_marks(whole)
            text = renderer.decode(trajectory.tokens_T.tolist())
            trained_tail = renderer.decode(trajectory.tokens_T[starts[-1] :].tolist())
            assert (
                whole.removesuffix(renderer.after_reply) + renderer.end_of_turn
            ).endswith(trained_tail), name
            assert renderer.without_thinking(text) == renderer.without_thinking(
                whole.removesuffix(renderer.after_reply) + renderer.end_of_turn
            ), name
            assert trajectory.trained_T[-1], "a trajectory ends with the end of a reply"
            assert trajectory.tokens_T[-1] == renderer.end_of_turn_id
        assert stretches == len(places), f"{name}: every reply is trained once"
    assert refused == {(of, name) for of, name in REFUSED if of == model}


def _begins(trajectory: TokenizedTrajectory, at: int) -> bool:
    return bool(trajectory.trained_T[at]) and not trajectory.trained_T[at - 1]


MARKED = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{{- '\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_mask_of_a_template_with_generation_marks_equals_that_of_transformers(
    tiny: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "marked"))
    (folder / "chat_template.jinja").write_text(MARKED)
    messages = [ASK, REPLY, MORE, {"role": "assistant", "content": "12 and 7."}]
    reference = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    [trajectory] = trajectories(
        load_renderer(str(folder), NO_LIMIT), conversation(*messages)
    )
    length = len(trajectory.tokens_T)
    assert trajectory.tokens_T.tolist() == reference["input_ids"][:length]
    assert (
        trajectory.trained_T.astype(int).tolist()
        == reference["assistant_masks"][:length]
    )
    assert not any(reference["assistant_masks"][length:])


def test_tokens_outside_of_the_templates_marks_are_not_trained(
    tiny: Path, tmp_path: Path
) -> None:
    """Here the mark begins behind a word that no prompt asks for, and leaves out the
    end of turn, which is trained all the same."""
    folder = Path(shutil.copytree(tiny, tmp_path / "marked"))
    marked = MARKED.replace("{% generation %}", "{{ 'Well: ' }}{% generation %}")
    marked = marked.replace(
        "+ '<|im_end|>' }}{% endgeneration %}",
        "}}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert marked.count("Well") == 1
    (folder / "chat_template.jinja").write_text(marked)
    renderer = load_renderer(str(folder), NO_LIMIT)
    dialogue_trajectories = trajectories(
        renderer, conversation(ASK, REPLY, MORE, REPLY)
    )
    assert [
        shown(renderer, trajectory).count("assistant\nWell: [[Yes.<|im_end|>]]")
        for trajectory in dialogue_trajectories
    ] == [1, 1]
    assert "Well: Yes.<|im_end|>" in shown(renderer, dialogue_trajectories[1]), (
        "the first reply is context of the second"
    )


def test_template_whose_prompt_differs_from_its_history_is_refused(
    tiny: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "asking"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    source = settings["chat_template"]
    asking = source.replace(
        "<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}"
    )
    assert asking != source
    (folder / "chat_template.jinja").write_text(asking)
    with pytest.raises(UnusableRowError, match="another way than it asks") as caught:
        trajectories(load_renderer(str(folder), NO_LIMIT), conversation(ASK, REPLY))
    assert "reasoning_content" in caught.value.fix
