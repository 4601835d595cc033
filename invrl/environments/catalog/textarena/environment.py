"""textarena: its games for one player, by their ids.

    game       "FrozenLake-v0", "TowerOfHanoi-v0", "GuessTheNumber-v0", ...
    max_turns  moves in one episode

The task's seed resets the game. Reward: the game's own, of player 0; the game judges an
unfinished or invalid move itself.
"""

import os

REWARD = (-1.0, 1.0)
_LONGEST_OBSERVATION = 8000
"""Characters of an observation that the model sees, from its end."""


def episode(model, task, *, game: str = "GuessTheNumber-v0", max_turns: int = 10):
    # textarena makes clients of other services when it is imported
    os.environ.setdefault("OPENROUTER_API_KEY", "none")
    import textarena

    world = textarena.make(game)
    world.reset(num_players=1, seed=task["seed"])
    messages = []
    seen = ""
    over = False
    turns = 0
    while not over and turns < max_turns:
        turns += 1
        _, observation = world.get_observation()
        shown = str(observation).removeprefix(seen)  # many games repeat what they said
        seen = str(observation)
        shown = shown[-_LONGEST_OBSERVATION:]
        messages.append({"role": "user", "content": shown})
        reply = model.chat(messages)
        messages.append({"role": "assistant", "content": reply})
        over, _ = world.step(action=reply)
    rewards, _ = world.close()
    reward = float((rewards or {}).get(0, 0.0))
    return {
        "reward": reward,
        "components": {"turns": float(turns), "game_over": float(over)},
    }
