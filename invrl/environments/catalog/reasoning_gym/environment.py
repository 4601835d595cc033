"""reasoning-gym: procedural puzzles with scorers, one question and one answer.

    dataset   name of one of its data sets ("chain_sum", "gcd", "leg_counting", ...)
    config    the data set's own settings, as JSON: {"min_terms": 2, "max_terms": 2}

The task's seed makes the question. Reward: the data set's own score, 0 to 1. The answer
is the text between <answer> tags, or else the whole reply.
"""

import json

REWARD = (0.0, 1.0)
_ASK = "Give the final answer between <answer> and </answer>."


def episode(model, task, *, dataset: str = "chain_sum", config: str = "{}"):
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    settings = json.loads(config)
    questions = reasoning_gym.create_dataset(
        dataset, size=1, seed=task["seed"], **settings
    )
    entry = questions[0]
    prompt = f"{entry['question']}\n{_ASK}"
    reply = model.chat([{"role": "user", "content": prompt}])
    answer = extract_answer(reply)
    tagged = answer is not None
    if not tagged:
        answer = reply.strip()
    score = questions.score_answer(answer, entry)
    return {
        "reward": score,
        "components": {"score": score, "tagged": float(tagged)},
    }
