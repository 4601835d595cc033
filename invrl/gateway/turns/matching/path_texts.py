"""Which recorded path a prompt without a template begins with. Pure."""

from invrl.gateway.types import Decode, Node

RawPrompt = str | tuple[int, ...]
"""A prompt without a template: text or ids."""


class PathTexts:
    """The texts of nodes' paths, each decoded once."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        """Whole text of each turn's path, for turns without a template."""

    def covered(self, prompt: RawPrompt, node: Node, decode: Decode) -> int:
        """Return the size of the node's whole text, or ids, if the prompt begins with
        it; 0 if not."""
        # of each node, because those of its children begin with it
        text = self._text(node, decode)
        if isinstance(prompt, str):
            return len(text) if prompt.startswith(text) else 0
        sampled = tuple(node.turn.sampled_ids_T.tolist())
        size = node.turn.prompt_tokens + len(sampled)
        same_end = prompt[size - len(sampled) : size] == sampled  # a cheap test first
        return size if same_end and prompt[:size] == tuple(node.ids()) else 0

    def _text(self, node: Node, decode: Decode) -> str:
        """Return the whole text of a node's path. Its parent's must have been requested
        before."""
        text = self._texts.get(node.turn.id)
        if text is None:
            before = ""
            if node.parent is not None:
                before = self._texts[node.parent.turn.id]
            sampled_text = decode(node.turn.sampled_ids_T.tolist())
            text = before + node.messages[0].content + sampled_text
            self._texts[node.turn.id] = text
        return text
