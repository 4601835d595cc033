"""Forms of tool calls: the marks around a call, by the name of SGLang's parser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Marks of one family of models. A block of text that may be a call begins with one
    of `begins` and ends with the first of `ends`; without `ends` it ends with the
    text."""

    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()
    outer: str = ""
    """Mark that SGLang's parser expects before a block. It is added to a block that
    lacks it."""
    closing: str = ""
    """Mark after the last call."""
    lenient: bool = False
    """Whether SGLang's parser takes a block without its end mark for a whole call."""


_DEEPSEEK = CallForm(
    begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
    ends=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    outer="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
)
CALL_FORMS = {
    "HermesDetector": CallForm(begins=("<tool_call>",), ends=("</tool_call>",)),
    "Qwen3CoderDetector": CallForm(
        begins=("<tool_call>",), ends=("</tool_call>",), lenient=True
    ),
    "Qwen25Detector": CallForm(begins=("<tool_call>\n",), ends=("\n</tool_call>",)),
    "DeepSeekV3Detector": _DEEPSEEK,
    "DeepSeekV31Detector": _DEEPSEEK,
    "DeepSeekV32Detector": CallForm(
        begins=("<｜DSML｜function_calls>", "<｜DSML｜invoke"),
        ends=("</｜DSML｜function_calls>",),
    ),
    "MistralDetector": CallForm(begins=("[TOOL_CALLS]",)),
}
"""Known forms. With any other parser, everything from its first mark on is one
block."""
