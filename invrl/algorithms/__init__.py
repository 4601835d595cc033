"""The RL objective as independent axes, one file per axis. Pure functions.

| question | file |
|---|---|
| how a reward becomes an advantage | `advantages.py` |
| the loss of a micro-batch, where the axes meet | `losses.py` |
| the ratio current/old | `ratios.py` |
| the old policy: recomputed, the engine's, interpolated | `old_policy.py` |
| the policy loss of one token (clipping) | `policy_losses.py` |
| the off-policy correction old/rollout | `corrections.py` |
| the KL term | `kl.py` |
| coefficients that are adapted after each batch | `adaptive.py` |
| from token losses to one number | `aggregation.py` |
| settings and presets | `config.py` |

Each axis ends with a dict of its built-ins by name. A new built-in is a function in the
axis's file, an entry in that dict, and its name in `config.py`. The package imports
only the modules of `invrl/` itself, and no torch.distributed. Start with `losses.py`.
"""
