"""Keys leave the environment before user code runs, and stay out of logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from invrl.host.processes.environment_keys import take_environment_key

KEYS = {
    "INVRL_ENV_KEY": "env-of-the-user-0123456789",
    "RAY_AUTH_TOKEN": "token-of-ray-0123456789",
}


def told_by(program: str) -> dict:
    """What a fresh process with both keys says, as JSON."""
    environment = {
        **os.environ,
        **KEYS,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return json.loads(
        subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    )


def test_process_and_its_children_have_no_keys_after_forgetting_them():
    printed = told_by("""
        import json, os, subprocess, sys
        from invrl.host.processes.environment_keys import forget_keys
        def shown():
            ours = open("/proc/self/environ").read()
            child = subprocess.run(["env"], capture_output=True, text=True).stdout
            return {"proc": ours, "os": str(dict(os.environ)), "child": child}
        before = shown()
        forget_keys()
        forget_keys()
        print(json.dumps({"before": before, "after": shown()}))
    """)
    for key in KEYS.values():
        assert all(key in text for text in printed["before"].values())
        assert not any(key in text for text in printed["after"].values())
    for place in ("proc", "os", "child"):
        assert "PYTHONPATH" in printed["after"][place], "nothing else is lost"


def test_environment_key_is_read_once_and_rays_token_stays():
    printed = told_by("""
        import json, os
        from invrl.host.processes.environment_keys import take_environment_key
        keys = [take_environment_key(), take_environment_key()]
        print(json.dumps({"keys": keys, "token": os.environ.get("RAY_AUTH_TOKEN"),
                          "proc": open("/proc/self/environ").read()}))
    """)
    assert printed["keys"] == [KEYS["INVRL_ENV_KEY"], ""]
    assert printed["token"] == KEYS["RAY_AUTH_TOKEN"]
    assert KEYS["INVRL_ENV_KEY"] not in printed["proc"]


def test_key_set_later_is_forgotten_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INVRL_ENV_KEY", "set by this process")
    assert take_environment_key() == "set by this process"
    assert "INVRL_ENV_KEY" not in os.environ


def test_user_code_imported_by_checks_sees_no_keys(tmp_path: Path) -> None:
    (tmp_path / "looking.py").write_text(
        textwrap.dedent("""
            import json, os, subprocess
            child = subprocess.run(["env"], capture_output=True, text=True).stdout
            ours = open("/proc/self/environ").read()
            with open(os.environ["FOUND"], "w") as file:
                json.dump({"os": str(dict(os.environ)), "proc": ours, "child": child}, file)

            async def rollout(task, endpoint):
                return 0.0
        """)
    )
    environment = {
        **os.environ,
        **KEYS,
        "FOUND": str(tmp_path / "found"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    command = [
        sys.executable,
        "-m",
        "invrl.cli",
        "doctor",
        "--rollout-function-path",
        "looking:rollout",
    ]
    subprocess.run(command, env=environment, capture_output=True, cwd=tmp_path)
    seen_keys = json.loads((tmp_path / "found").read_text())
    for place, text in seen_keys.items():
        assert "FOUND" in text, place
        assert not any(key in text for key in KEYS.values()), place


def test_held_key_is_visible_only_to_the_process_started_with_it():
    printed = told_by("""
        import json, os, subprocess
        from invrl.host.processes.environment_keys import (
            ENVIRONMENT_KEY, RAY_TOKEN, held_key, held_keys, hold_keys, key_in_environment,
            take_environment_key,
        )
        def child():
            return subprocess.run(["env"], capture_output=True, text=True).stdout
        hold_keys()
        held = dict(held_keys())
        with key_in_environment(RAY_TOKEN):
            within = child()
        after = child()
        with key_in_environment(RAY_TOKEN):
            again = child()
        taken = [take_environment_key(), take_environment_key()]
        print(json.dumps({"held": held, "within": within, "after": after, "again": again, "taken": taken,
                          "left": held_key(ENVIRONMENT_KEY)}))
    """)
    assert printed["held"] == KEYS
    for place in ("within", "again"):
        assert KEYS["RAY_AUTH_TOKEN"] in printed[place]
        assert KEYS["INVRL_ENV_KEY"] not in printed[place]
    assert not any(key in printed["after"] for key in KEYS.values())
    assert printed["taken"] == [KEYS["INVRL_ENV_KEY"], ""]
    assert printed["left"] is None
