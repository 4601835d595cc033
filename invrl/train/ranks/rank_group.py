"""The ranks of one model: the policy's, or those of a critic on separate ranks."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from invrl.host.ray.actor import ActorHandle
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.ranks.rank_actor import RankActor
from invrl.train.ranks.rank_calls import call_deadline
from invrl.types.file_entry import FileEntries

Parameters = ParamSpec("Parameters")
Reply = TypeVar("Reply")
Argument = TypeVar("Argument")
ActorT = TypeVar("ActorT", bound=RankActor[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup(Generic[ActorT]):
    """Makes calls of its ranks for `RankCalls.wait`."""

    actors: Sequence[ActorHandle[ActorT]]
    layout: ParallelLayout
    first: int = 0
    """Number of its first rank among all ranks of the trainer."""
    folder: str = ""
    """Folder of its state, below that of a checkpoint."""

    @property
    def ranks(self) -> Sequence[int]:
        return range(len(self.actors))

    def calls(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        method: Callable[Concatenate[ActorT, Parameters], Awaitable[Reply]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Coroutine[Any, Any, Reply]]:
        """Make calls of these ranks of the group, with the same arguments."""
        deadline_s = call_deadline(timeout_s)
        return {
            self.first + rank: self.actors[rank].call(
                method, deadline_s, *args, **kwargs
            )
            for rank in ranks
        }

    def calls_by_replica(
        self,
        timeout_s: float,
        method: Callable[[ActorT, Argument], Awaitable[Reply]],
        by_replica: Sequence[Argument],
    ) -> dict[int, Coroutine[Any, Any, Reply]]:
        """Make calls of all ranks, with the argument of their replica."""
        calls: dict[int, Coroutine[Any, Any, Reply]] = {}
        for rank in self.ranks:
            replica = self.layout.coordinates(rank).data
            calls |= self.calls([rank], timeout_s, method, by_replica[replica])
        return calls

    def reported(self, replies: Mapping[int, Reply]) -> list[Reply]:
        """Return one reply per replica: that of its reporter."""
        return [
            replies[self.first + self.layout.reporter(replica)]
            for replica in range(self.layout.data)
        ]

    def files(self, entries_by_rank: Mapping[int, FileEntries]) -> FileEntries:
        """Return the files of all its ranks, by path in the checkpoint's folder."""
        return {
            str(PurePosixPath(self.folder, path)): entry
            for entries in entries_by_rank.values()
            for path, entry in entries.items()
        }
