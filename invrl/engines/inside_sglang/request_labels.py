"""Fields of a request that the router drops, sent to an engine as labels.

sglang-router 0.3.2 forwards only the fields of `/generate` that it knows, and of the
sampling parameters only those that it knows. One of the fields is `custom_labels`,
which SGLang uses only for metrics. So the request carries labels, from which the
engine's HTTP process sets the fields.
"""

EXPERTS_LABEL = "invrl_experts_from"
"""Label with the position of the first token whose experts are returned. Without the
label no experts are returned."""
INTERVAL_LABEL = "invrl_stream_interval"
"""Label with the number of tokens in each event of the stream. Without the label the
engine's own setting counts."""


def read_labels() -> None:
    """Set the fields from the labels. Call this in the engine's HTTP process. Imports
    SGLang."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalize = GenerateReqInput.normalize_batch_and_arguments

    def normalize_with_labels(self: GenerateReqInput) -> None:
        labels = self.custom_labels or {}
        start = labels.pop(EXPERTS_LABEL, None)
        if start is not None:
            self.return_routed_experts = True
            self.routed_experts_start_len = int(start)
        interval = labels.pop(INTERVAL_LABEL, None)
        if interval is not None and isinstance(self.sampling_params, dict):
            self.sampling_params["stream_interval"] = int(interval)
        normalize(self)

    GenerateReqInput.normalize_batch_and_arguments = normalize_with_labels
