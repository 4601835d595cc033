"""Verdicts of the group filter on complete groups, and the response to a long row of
drops."""

from typing import cast

from invrl.buffer.config import BufferConfig
from invrl.buffer.failures import GROUP_FILTER, FailureStreak
from invrl.buffer.groups.wait_report import FilteredStreak, shown_rewards
from invrl.buffer.ledger.open_group import OpenGroup
from invrl.interfaces import GroupFilter, HistoryGroupFilter
from invrl.types.groups import TaskHistory
from invrl.user_code.frame import USER_FRAME_PREFIX, describe_exception, raised_at
from invrl.user_code.plugins import takes_history

NO_TOKENS = "no_trained_tokens"
"""Reason to drop a group without a token to train. It is never the filter's."""
_MAX_REASON_CHARS = 64
"""Maximum length of a group filter's reason."""


class FilterVerdicts:
    """Applies the group filter. `batch_size` is in groups; `failures` gets the first
    exception of the filter."""

    def __init__(
        self,
        group_filter: GroupFilter | HistoryGroupFilter,
        config: BufferConfig,
        *,
        batch_size: int,
        failures: FailureStreak,
    ) -> None:
        self.takes_history = takes_history(group_filter)
        """Whether the filter reads the history of a group's task."""
        self._filter = group_filter
        self._failures = failures
        self._overrules = config.filtered_out == "train"
        self.filter_name = config.group_filter
        self.limit = (config.max_filtered_batches or 0) * batch_size
        """Groups in a row that the filter may drop; 0: any number."""
        self.streak = FilteredStreak()

    def verdict(self, group: OpenGroup, history: TaskHistory) -> str | None:
        """Return the reason to drop the group; None to keep it. `history` has the
        earlier groups of its task."""
        if group.versions() is None:
            return NO_TOKENS
        reason = self._filter_reason(group, history)
        if reason is None:
            self.streak.kept()
        else:
            self.streak.dropped(group.group(), reason)
        return reason

    def is_overruled(self, reason: str) -> bool:
        """Whether the group is trained although the filter drops it, because the run
        trains the next groups once too many in a row were dropped."""
        return reason != NO_TOKENS and self._overrules and self._is_past_limit()

    @property
    def filtered_out(self) -> str:
        """Reason to end the run: the filter has dropped as many groups in a row as it
        may. "" until then."""
        if self._overrules or not self._is_past_limit():
            return ""
        return (
            f"the group filter {self.filter_name} has dropped {self.streak.length} groups in a row "
            f"({shown_rewards(self.streak.by_rewards)}), so there is nothing to train on"
        )

    def _is_past_limit(self) -> bool:
        return self.limit > 0 and self.streak.length >= self.limit

    def _filter_reason(self, group: OpenGroup, history: TaskHistory) -> str | None:
        """Return the filter's reason. A filter that raises drops the group, and that is
        counted: it is bad data, not a crash."""
        try:
            if self.takes_history:
                reason = cast(HistoryGroupFilter, self._filter)(
                    group.group(), history=history
                )
            else:
                reason = cast(GroupFilter, self._filter)(group.group())
        except (Exception, SystemExit) as error:
            line = raised_at(error, self._filter)
            detail = f"{describe_exception(error)}\n{USER_FRAME_PREFIX}{line}"
            self._failures.note_user_code(GROUP_FILTER, detail)
            return f"filter_raised_{type(error).__name__}"
        if reason is None:
            return None
        # The reason becomes part of metric names and of the ledger, which take only
        # Unicode text.
        is_usable = (
            isinstance(reason, str)
            and len(reason) <= _MAX_REASON_CHARS
            and reason.isprintable()
        )
        if not is_usable:
            return "filter_returned_no_word"
        return reason
