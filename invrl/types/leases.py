"""The place of a rollout in the run, and the work that the buffer hands out."""

from dataclasses import dataclass

from invrl.types.tasks import Task


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rollout in the run: its group, its index in the group, and the
    number of the attempt at that index. No two rollouts share a place."""

    group_id: str
    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A place within a group that is known from the context, such as a lease."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLease:
    """Work handed out by the buffer: run these members of this group. A later lease of
    the same group holds the replacements of members that failed."""

    group_id: str
    task: Task
    members: tuple[GroupMember, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(
            Place(self.group_id, member.index, member.attempt)
            for member in self.members
        )
