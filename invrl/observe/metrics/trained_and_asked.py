"""Detects that what is trained no longer looks like what was asked for, because
rollouts were lost that were longer, or rewarded otherwise, than the others.

Pure: judges a row of metrics, for console, report and overview.
"""

from collections.abc import Mapping

_RARE = 0.01
"""p-value below which a difference is not taken for chance."""
_TOLERANCE = 0.02
"""Ratio of lengths, and difference of rewards, that do not matter."""
SELECTION_METRICS = (
    "buffer/lost_share",
    "buffer/trained_length_ratio",
    "buffer/trained_length_p",
    "buffer/trained_reward_difference",
    "buffer/trained_reward_p",
)
"""Metrics of a row that `trained_and_asked` reads."""


def trained_and_asked(row: Mapping[str, float | None]) -> str:
    """Describe how the trained rollouts differ from all that were asked for, and what
    helps; "" if they do not."""
    differences: list[str] = []
    ratio = row.get("buffer/trained_length_ratio")
    if ratio is not None and _is_rare(row, "length") and abs(ratio - 1) > _TOLERANCE:
        differences.append(f"have {ratio:.2f} times their mean length")
    difference = row.get("buffer/trained_reward_difference")
    if (
        difference is not None
        and _is_rare(row, "reward")
        and abs(difference) > _TOLERANCE
    ):
        differences.append(f"have a mean reward that is {difference:+.2g} off")
    if not differences:
        return ""
    lost_share = row.get("buffer/lost_share") or 0.0
    return (
        f"{lost_share:.0%} of the last rollouts were lost, and those that are trained "
        f"{' and '.join(differences)}, compared with all: the policy learns another distribution than its "
        "tasks have. The reasons are in buffer/groups_dropped/…; --when-stale train loses none for its age"
    )


def _is_rare(row: Mapping[str, float | None], name: str) -> bool:
    probability = row.get(f"buffer/trained_{name}_p")
    return probability is not None and probability < _RARE
