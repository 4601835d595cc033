"""How a request asks an engine for the experts that computed its tokens: by a label.

SGLang has two fields for that. sglang-router 0.3.2 drops them, because it passes on
only the fields of `/generate` that it knows. `custom_labels`, which SGLang uses for its
metrics alone, is one of those. So the request has a label, and the engine's HTTP
process sets the two fields by it.
"""

EXPERTS_LABEL = "invrl_experts_from"
"""The position of the first token whose experts are wanted. Without the label no
experts are returned."""


def answer_with_experts() -> None:
    """To be called in the engine's HTTP process. Imports SGLang."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalize = GenerateReqInput.normalize_batch_and_arguments

    def normalize_with_experts(self: GenerateReqInput) -> None:
        start = (self.custom_labels or {}).pop(EXPERTS_LABEL, None)
        if start is not None:
            self.return_routed_experts = True
            self.routed_experts_start_len = int(start)
        normalize(self)

    GenerateReqInput.normalize_batch_and_arguments = normalize_with_experts
