"""The RL objective as independent axes, one file per axis. Pure functions.

| question | file |
|---|---|
| how a reward becomes an advantage | `advantages/advantages.py` |
| the loss of a micro-batch, where the axes meet | `policy_loss/losses.py` |
| the ratio current/old | `policy_loss/ratios.py` |
| the old policy: recomputed, the engine's, the user's | `policy_loss/old_policy.py` |
| the policy loss of one token (clipping) | `policy_loss/policy_losses.py` |
| the off-policy correction old/rollout | `policy_loss/corrections.py` |
| the KL term | `policy_loss/kl.py` |
| user code of the axes, and what adapts settings during a run | `policy_loss/axis_plugins.py` |
| from token losses to one number | `policy_loss/aggregation.py` |
| settings and presets | `config.py` |

Each axis ends with a dict of its built-ins by name. A new built-in is a function in the
axis's file, an entry in that dict, and its name in `config.py`. The package imports
only the modules of `invrl/` itself, and no torch.distributed. The rooms from the ground
up: `advantages`, `policy_loss` and `objectives`. Start with `policy_loss/losses.py`.
"""
