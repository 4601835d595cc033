"""Requests the experts that computed a reply's tokens from an engine: by a label.

SGLang has two fields for that. sglang-router 0.3.2 drops them, because it forwards only
known fields of `/generate`. One of these is `custom_labels`, which SGLang uses only for
metrics. So the request carries a label, from which the engine's HTTP process sets the
two fields.
"""

EXPERTS_LABEL = "invrl_experts_from"
"""Label with the position of the first token whose experts are returned. Without the
label no experts are returned."""


def respond_with_experts() -> None:
    """Set the fields from the label. Call this in the engine's HTTP process. Imports
    SGLang."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalize = GenerateReqInput.normalize_batch_and_arguments

    def normalize_with_experts(self: GenerateReqInput) -> None:
        start = (self.custom_labels or {}).pop(EXPERTS_LABEL, None)
        if start is not None:
            self.return_routed_experts = True
            self.routed_experts_start_len = int(start)
        normalize(self)

    GenerateReqInput.normalize_batch_and_arguments = normalize_with_experts
