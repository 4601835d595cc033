"""A toy without packages, which does what its arguments say.

behave  "play", or a way to fail
"""

import os
import signal
import subprocess
import sys
import time

REWARD = (0.0, 1.0)


def episode(model, task, *, behave: str = "play", pause_s: float = 0.0):
    if behave == "hang in reset":
        time.sleep(60)
    if behave == "import":
        import a_package_that_nobody_has  # noqa: F401
    if behave == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behave == "leave a process":
        subprocess.Popen(["sleep", "300.25"], start_new_session=True)
    if behave == "print keys":
        print(f"my key is {model.key}; {model.base_url}", flush=True)
        os.system(f"echo from a child: {model.key}")
        print(f"api_key={model.key}", file=sys.stderr, flush=True)
    reply = model.chat([{"role": "user", "content": f"task {task['seed']}"}])
    time.sleep(pause_s)
    if behave == "hang in step":
        time.sleep(60)
    rewards = {"nan": float("nan"), "too much": 1.5, "no number": "much"}
    reward = rewards.get(behave, float(bool(reply)))
    if behave == "nothing":
        return None
    part = float("inf") if behave == "part" else 0.25
    name = "refused" if behave == "refused" else "part"
    return {"reward": reward, "components": {name: part}}
