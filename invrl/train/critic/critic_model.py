"""The critic's model: a decoder like the policy's, with a value head instead of a
vocabulary projection.

The value of a token is a linear function of the hidden state that predicts the token:
the expected sum of the rewards from there on, before the token is known. It is computed
where a log-prob would be, so shared prefixes, packing and every layout of ranks are
those of the policy. Imported after `device.prepare()`.
"""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from invrl.families.model_config import HuggingFaceConfig
from invrl.train.model.policy_model import PolicyModel
from invrl.train.parallel.context_parallel import gather_wanted
from invrl.train.parallel.context_share import ContextShare
from invrl.train.runtime import device
from invrl.train.runtime.device import to_device


class ValueHead(torch.nn.Module):
    """A linear function of hidden states, whole on every tensor-parallel rank.

    Its weight begins at 0, so that the first values are 0 whatever the model: the value
    head of OpenAI's lm-human-preferences (Huang et al. 2024, "The N implementation
    details of RLHF with PPO"), here without a bias.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden_UH: torch.Tensor) -> torch.Tensor:
        """Return values float32 [U], whatever the dtype of the model: bfloat16 would
        distinguish 0.700 from 0.703 at best."""
        return torch.nn.functional.linear(
            hidden_UH.float(), self.weight.float()
        ).squeeze(1)


class CriticModel(PolicyModel):
    """A decoder, or a chunk of its layers, that returns values."""

    projects = False

    def describe(self, shape: HuggingFaceConfig) -> None:
        super().describe(shape)
        if self.post_process:
            self.output_layer = ValueHead(
                self.config.hidden_size, self.config.params_dtype
            )

    def _outputs(
        self, hidden: torch.Tensor, share: ContextShare
    ) -> tuple[torch.Tensor, ...]:
        """Return the values of the wanted tokens, float32 [N], alone in a tuple."""
        target = device.device()
        # All tensor-parallel ranks compute the same values, so each has the whole
        # gradient of them already.
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
        projections, is_own_N = share.own_projections()
        project_U = to_device(share.own_indices(projections.project_U), target)
        value_U = self.output_layer(hidden.squeeze(1).index_select(0, project_U))
        value_N = value_U[to_device(projections.projection_N, target)]
        return (gather_wanted(value_N, to_device(is_own_N, target)),)


def critic_shape(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the model without an untied projection: a folder's is not read."""
    return config.model_copy(update={"tie_word_embeddings": True})
