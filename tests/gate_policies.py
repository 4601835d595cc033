"""Policies of a gate that tests name by their import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from invrl.types.fleet import FleetSnapshot, LiveSession, TurnPlan


def hold_all(
    fleet: FleetSnapshot, sessions: Sequence[LiveSession]
) -> Mapping[str, TurnPlan]:
    return {session.id: TurnPlan(hold=True) for session in sessions}


def without_sessions(fleet: FleetSnapshot) -> Mapping[str, TurnPlan]:
    """Cannot be called as a policy."""
    return {}
