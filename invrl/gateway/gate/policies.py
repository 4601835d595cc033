"""The policies of the gate: pure functions of the fleet's load and the live sessions."""

from collections.abc import Mapping, Sequence

from invrl.interfaces import GatePolicy
from invrl.types.fleet import EngineLoad, FleetSnapshot, LiveSession, TurnPlan
from invrl.user_code.plugins import load_plugin

_PLACED_SHARE = 0.9
"""Share of a KV cache that sessions get places in. The rest is for the tokens that their
next turns add."""
_GROWTH_SHARE = 0.1
"""Share of a KV cache that must be free in addition to the place that a held session
gets. Otherwise those that already have places would soon take it back, and the session
would have computed its whole prompt for a few turns."""


def program(
    fleet: FleetSnapshot, sessions: Sequence[LiveSession]
) -> Mapping[str, TurnPlan]:
    """Keep the cache of the oldest groups. The sessions of an engine get places in its
    KV cache: first those that run, then the others by the age of their group. A waiting
    session without a place moves to another engine that has room, or is held.

    A held session gets a place only with room for growth. Once a session finds no
    place, younger ones of its engine find none either: they would fill the room that it
    waits for. The order does not depend on what sessions do or how large they are,
    because each change of it costs a cache."""
    room = {
        name: int(_PLACED_SHARE * load.kv_tokens)
        for name, load in fleet.engines.items()
        if load.kv_tokens
    }
    unused = set(room)
    homeless: list[LiveSession] = []
    for session in sorted(sessions, key=_precedence):
        home = session.engine
        if home is None:
            homeless.append(session)
        elif home not in room:
            continue  # its engine reports no load
        elif (
            _needed(session, fleet.engines[home]) <= room[home]
            or session.state == "running"
            or home in unused  # else a very large session would never pass
        ):
            room[home] = max(0, room[home] - session.tokens)
            unused.discard(home)
        else:
            room[home] = 0
            homeless.append(session)
    plans: dict[str, TurnPlan] = {}
    for session in homeless:
        if session.state != "waiting" or not room:
            continue
        emptiest = max(room, key=room.__getitem__)
        needed = _needed(session, fleet.engines[emptiest])
        if needed <= room[emptiest] or emptiest in unused:
            room[emptiest] = max(0, room[emptiest] - session.tokens)
            unused.discard(emptiest)
            plans[session.id] = TurnPlan(engine=emptiest)
        else:
            plans[session.id] = TurnPlan(hold=True)
    return plans


def _needed(session: LiveSession, load: EngineLoad) -> int:
    """Return the free tokens that a session needs to get a place."""
    if session.is_held and load.kv_tokens:
        return session.tokens + int(_GROWTH_SHARE * load.kv_tokens)
    return session.tokens


def _precedence(session: LiveSession) -> tuple[bool, float, str, str]:
    return (
        session.state != "running",
        session.group_opened_at,
        session.group_id,
        session.id,
    )


POLICIES: dict[str, GatePolicy] = {"program": program}


def gate_policy(path: str) -> GatePolicy:
    """Return the built-in policy of that name, or the user's function at `module:name`.
    Raises PluginError."""
    return load_plugin(path, "gate.policy", GatePolicy, POLICIES)
