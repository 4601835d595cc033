"""The ids of a reply as the chat template writes it, which a model that follows it
samples."""

from dataclasses import replace

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.thinking import END_THINK, THINK
from invrl.gateway.types import Prompt


def template_reply(
    renderer: Renderer, prompt: Prompt, position: int, *, cut: bool = False
) -> list[int]:
    """Return the ids of a reply, as the template writes it after the head that its
    prompt ends with. `cut`: the reply has no end of turn. Raises SessionError if the
    template refuses the conversation."""
    request = replace(prompt, messages=prompt.messages[:position])
    conversation = replace(prompt, messages=prompt.messages[: position + 1])
    asked = renderer.text(request)
    answered = renderer.text(conversation, add_generation_prompt=False)
    answered = answered.removesuffix(renderer.after_reply)
    reasoning = prompt.messages[position].reasoning
    if answered.startswith(asked):
        text = answered.removeprefix(asked)
    else:
        text = _reply_behind_another_head(renderer, asked, answered)
        if asked.rstrip().endswith(THINK):
            text = f"{reasoning}{END_THINK}{text}"
    if not reasoning:
        text = text.removeprefix(f"{THINK}\n\n{END_THINK}\n\n")
    if not cut:
        text += renderer.end_of_turn
    return renderer.encode_after(asked, text)


def _reply_behind_another_head(renderer: Renderer, asked: str, answered: str) -> str:
    """Return the text of a reply if the template writes another head for it than in its
    prompt. In a usable template, the heads differ only in thinking or whitespace."""
    visible_prompt = visible_text(renderer, asked)
    visible_reply = visible_text(renderer, answered).removeprefix(visible_prompt)
    if not visible_reply:
        return ""
    visible_places = [
        place for place, letter in enumerate(answered) if not letter.isspace()
    ]
    begin = visible_places[-len(visible_reply)]
    return answered[begin:]


def visible_text(renderer: Renderer, text: str) -> str:
    """Return the text without thinking, without its marks and without whitespace."""
    text = renderer.without_thinking(text)
    for mark in (THINK, END_THINK):
        text = text.replace(mark, "")
    return text
