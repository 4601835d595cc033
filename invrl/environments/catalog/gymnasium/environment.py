"""Gymnasium: its text games, with the picture that they draw as the observation.

    game       id of a game with discrete actions and a text picture ("FrozenLake-v1",
               "Taxi-v4", "CliffWalking-v1", "Blackjack-v1")
    max_turns  actions in one episode
    options    the game's own settings, as JSON: {"is_slippery": true}

The task's seed resets the game. Each reply names one action; one that names none is a
wasted turn and is said so. Reward: the game's rewards, added up.
"""

import json
import math
import re

REWARD = (-math.inf, math.inf)
_ACTIONS = {
    "FrozenLake": ["left", "down", "right", "up"],
    "FrozenLake8x8": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
}
"""Names of the actions 0, 1, 2, ... of a game; the numbers, where it is not here."""
_COLOURS = re.compile(r"\x1b\[([0-9;]*)m")


def episode(
    model,
    task,
    *,
    game: str = "FrozenLake-v1",
    max_turns: int = 10,
    options: str = "{}",
):
    import gymnasium

    settings = {"render_mode": "ansi", **json.loads(options)}
    if game.startswith("Blackjack"):  # it draws pixels only
        del settings["render_mode"]
    if game.startswith("FrozenLake"):
        settings.setdefault("is_slippery", False)
    with gymnasium.make(game, **settings) as world:
        return _play(model, task, world, game, max_turns)


def _play(model, task, world, game: str, max_turns: int) -> dict:
    actions = _ACTIONS.get(game.partition("-")[0])
    if actions is None:
        actions = [str(number) for number in range(world.action_space.n)]
    observation, _ = world.reset(seed=task["seed"])
    rules = f"You play {game}. Reply with one action: {', '.join(actions)}."
    messages = [{"role": "user", "content": f"{rules}\n{_shown(world, observation)}"}]
    total = 0.0
    invalid = 0
    turns = 0
    over = False
    while not over and turns < max_turns:
        turns += 1
        reply = model.chat(messages)
        action = _action(reply, actions)
        if action is None:
            invalid += 1
            answer = f"That names no action. Use one of: {', '.join(actions)}."
        else:
            observation, reward, ended, cut, _ = world.step(action)
            total += float(reward)
            over = ended or cut
            answer = _shown(world, observation)
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": answer},
        ]
    components = {
        "invalid_actions": float(invalid),
        "turns": float(turns),
        "game_over": float(over),
    }
    return {"reward": total, "components": components}


def _action(reply: str, actions: list[str]) -> int | None:
    """Return the number of the last action that the reply names."""
    words = re.findall(r"[a-z0-9]+", reply.lower())
    named = [word for word in words if word in actions]
    return actions.index(named[-1]) if named else None


def _shown(world, observation) -> str:
    """Return the game's picture. The coloured place, where the player is, is put into
    brackets."""
    if world.render_mode != "ansi":
        return f"observation: {observation}"
    return _bracketed(world.render()).strip("\n")


def _bracketed(picture: str) -> str:
    inside = False

    def bracket(match: re.Match) -> str:
        nonlocal inside
        begins = match[1] not in ("", "0")
        mark = ""
        if begins != inside:
            mark = "[" if begins else "]"
        inside = begins
        return mark

    return _COLOURS.sub(bracket, picture)
