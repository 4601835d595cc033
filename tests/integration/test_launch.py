"""The launch scripts: what they leave alone, where they can be called from, and what
they end.

The install from scratch is what CI itself does before it comes here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
from slow_cases import first_quick

from invrl.host.processes.process import still_running

ROOT = Path(__file__).parents[2]
CONTAINED = [sys.executable, str(ROOT / "launch" / "run_contained.py")]


def run(
    command: list[str], *, cwd: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what install.sh reads, at a path with spaces and an umlaut, with a
    stand-in for Python that records what would have been installed."""
    project = tmp_path / "ein Pfad mit ä"
    (project / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", project)
    for name in ("install.sh", "run_contained.py", "uv_settings.py"):
        shutil.copy(ROOT / "launch" / name, project / "launch")
    (project / "invrl" / "host" / "processes").mkdir(parents=True)
    for name in (
        "__init__.py",
        "host/__init__.py",
        "host/processes/__init__.py",
        "host/processes/descendants.py",
    ):
        shutil.copy(ROOT / "invrl" / name, project / "invrl" / name)
    shutil.copytree(ROOT / "invrl" / "requirements", project / "invrl" / "requirements")
    fake = project / "bin" / "python3.11"
    fake.parent.mkdir()
    fake.write_text(
        f"""#!/usr/bin/env bash
case "$*" in
  *sys.executable*) echo "$0" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *"-m pip install"*)
    sleep "${{SLOW_S:-0}}"
    echo "pip install ${{*#*install}}" >> "{project}/installed"
    exit ${{FAIL:-0}} ;;
  *"${{MISSING:-no module}}"*) exit 1 ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""
    )
    fake.chmod(0o755)
    return project


def install(project: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{project / 'bin'}:/usr/bin:/bin"
    settings = {"PATH": path, "INVRL_INSTALLER": "pip", "INVRL_DEVICE": "cpu"} | env
    return run([str(project / "launch" / "install.sh")], cwd=Path("/"), **settings)


def installs(project: Path) -> list[str]:
    file = project / "installed"
    return file.read_text().splitlines() if file.exists() else []


def bare(project: Path) -> str:
    """A PATH with what the script needs of a system, and no Python."""
    tools = project / "tools"
    tools.mkdir()
    for tool in ("env", "bash", "dirname", "cat", "sha256sum", "cut"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    return str(tools)


def test_second_install_changes_nothing_and_needs_no_python(project: Path) -> None:
    first = install(project)
    assert first.returncode == 0, first.stderr
    pinned, no_deps = installs(project)
    assert "-c invrl/requirements/constraints.txt -e .[cpu,dev]" in pinned
    assert "--no-deps -r invrl/requirements/nodeps.txt" in no_deps
    second = install(project, PATH=bare(project))
    assert (
        second.returncode,
        second.stdout,
        second.stderr,
        len(installs(project)),
    ) == (0, "", "", 2)


def test_changed_requirements_are_installed_into_the_same_environment(
    project: Path,
) -> None:
    install(project)
    (project / ".venv" / "kept").touch()
    with (project / "invrl" / "requirements" / "constraints.txt").open("a") as file:
        file.write("# newer\n")
    install(project)
    assert len(installs(project)) == 4
    assert (project / ".venv" / "kept").exists()


def test_broken_install_is_replaced(project: Path) -> None:
    assert install(project, FAIL="1").returncode != 0
    (project / ".venv" / "torn").touch()
    again = install(project)
    assert "starting afresh" in again.stdout
    assert not (project / ".venv" / "torn").exists()
    assert install(project).stdout == ""


def test_an_environment_whose_python_is_gone_is_made_afresh(project: Path) -> None:
    install(project)
    python = project / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(project / "no such python")
    again = install(project)
    assert "its Python is gone" in again.stdout
    assert len(installs(project)) == 4
    assert install(project).stdout == ""


def test_an_environment_that_lost_a_package_is_made_afresh(project: Path) -> None:
    """As after an upgrade of the system's Python, whose new version looks into another
    folder."""
    install(project)
    again = install(project, MISSING="sglang")
    assert "packages are gone from it" in again.stdout
    assert len(installs(project)) == 4


def test_an_environment_that_moved_with_its_project_is_made_afresh(
    project: Path, tmp_path: Path
) -> None:
    """Its programs name the Python of the folder where they were installed."""
    install(project)
    moved = project.rename(tmp_path / "moved")
    again = install(moved)
    assert f"it was made for {project}" in again.stdout
    assert install(moved).stdout == ""


def test_a_silent_installer_is_told_to_be_at_work(project: Path) -> None:
    process = install(project, SLOW_S="1.5", INVRL_TELL_INTERVAL_S="0.4")
    assert process.returncode == 0, process.stderr
    assert re.search(r"still installing, after \d+ s", process.stdout)
    assert process.stdout.splitlines()[-1].startswith("[install] done in")


def test_gpu_machine_installs_the_gpu_pins(project: Path) -> None:
    assert install(project, INVRL_DEVICE="gpu").returncode == 0
    pinned, no_deps = installs(project)
    assert "constraints-gpu.txt -e .[gpu,dev]" in pinned
    assert "nodeps-gpu.txt" in no_deps


def test_size_is_said_and_a_disk_that_is_too_full_is_refused(project: Path) -> None:
    pins = project / "invrl" / "requirements" / "constraints-gpu.txt"
    text = pins.read_text()
    size = re.search(r"^# Size: (.+) on disk\.", text, re.M)
    assert size is not None
    pins.write_text(text.replace(size[1], "4.5 GB to download, 9999999 GB"))
    refused = install(project, INVRL_DEVICE="gpu")
    assert refused.returncode == 1
    said = r"[\d.]+ GB are free .* need about 4.5 GB to download, 9999999 GB on disk"
    assert re.search(said, refused.stderr), refused.stderr
    assert installs(project) == []
    assert not (project / ".venv").exists()
    pins.write_text(text)
    done = install(project, INVRL_DEVICE="gpu")
    assert done.returncode == 0, done.stderr
    assert f"a few minutes; about {size[1]} on disk" in done.stdout


def test_no_fitting_python_is_a_readable_error(project: Path) -> None:
    process = install(project, PATH=bare(project))
    assert process.returncode == 1
    assert "no Python 3.11 or 3.12" in process.stderr


def test_installed_packages_match_the_constraints() -> None:
    from importlib.metadata import distributions

    # Only what is installed: a test that imports setuptools leaves its vendored
    # packages on sys.path.
    installed = distributions(path=[sysconfig.get_path("purelib")])
    pins = dict(
        line.strip().split("==")
        for line in (ROOT / "invrl" / "requirements" / "constraints.txt")
        .read_text()
        .splitlines()
        if "==" in line and not line.startswith("#")
    )
    have = {
        d.metadata["Name"].lower().replace("_", "-").replace(".", "-"): d.version
        for d in installed
    }
    wrong = {
        name: have[name]
        for name in pins.keys() & have.keys()
        if have[name].split("+")[0] != pins[name]
    }
    assert wrong == {}


def test_uv_uses_the_package_index_of_pip(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "launch" / "uv_settings.py")]
    process = run(
        script,
        cwd=tmp_path,
        PIP_FIND_LINKS="/a /wheels",
        PIP_CONFIG_FILE=os.devnull,
        UV_INDEX="",
    )
    exported = run(
        ["bash", "-c", f'{process.stdout}\nprintf %s "$UV_FIND_LINKS"'], cwd=tmp_path
    )
    assert exported.stdout == "/a,/wheels"
    assert "UV_INDEX=" not in process.stdout, "what is set for uv already stays"


# ----------------------------------------------------------------- run_contained.py


def test_run_contained_forwards_the_exit_code(tmp_path: Path) -> None:
    assert run([*CONTAINED, "sh", "-c", "exit 7"], cwd=tmp_path).returncode == 7
    assert (
        run([*CONTAINED, "sh", "-c", "kill -9 $$"], cwd=tmp_path).returncode == 128 + 9
    )


def test_run_contained_needs_only_the_standard_library(tmp_path: Path) -> None:
    """It runs before anything is installed: -S leaves out site-packages, psutil among
    them."""
    script = CONTAINED[1]
    assert (
        run(
            [sys.executable, "-I", "-S", script, "sh", "-c", "exit 5"], cwd=tmp_path
        ).returncode
        == 5
    )


ORPHAN = """setsid sleep 1000 & echo $! > {pids}
(setsid sh -c 'trap "" TERM; sleep 1001 & echo $! >> {pids}; wait' &)"""
"""Two processes in sessions of their own, one deaf to TERM; their ids in the file."""


def processes(file: Path) -> list[psutil.Process]:
    """Those of the ids in the file that there are."""
    found = []
    for word in file.read_text().split() if file.exists() else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(word)))
    return found


def started(file: Path, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while len(found := processes(file)) < count:
        assert time.monotonic() < deadline, "the command did not start"
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("end", first_quick(["exit 0", "exit 3"]))
def test_run_contained_ends_orphans_when_the_command_ends(
    end: str, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    both = f"until [ $(wc -l < {pids}) = 2 ]; do sleep 0.05; done"
    run(
        [*CONTAINED, "bash", "-c", f"{ORPHAN.format(pids=pids)}\n{both}; {end}"],
        cwd=tmp_path,
    )
    assert len(pids.read_text().split()) == 2
    assert still_running(processes(pids), within_s=0) == []


def test_run_contained_collects_orphans_that_end_before_the_command_does(
    tmp_path: Path,
) -> None:
    """A long run leaves many: each would keep its entry in the process table until the
    run's end."""
    orphan = f"(setsid sh -c 'echo $$ > {tmp_path}/pid; exit 3' &)"
    written = f"until [ -s {tmp_path}/pid ]; do sleep 0.05; done"
    collected = f"for i in $(seq 600); do [ -e /proc/$(cat {tmp_path}/pid) ] || exit 7; sleep 0.1; done; exit 4"
    assert (
        run(
            [*CONTAINED, "bash", "-c", f"{orphan}; {written}; {collected}"],
            cwd=tmp_path,
        ).returncode
        == 7
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_run_contained_forwards_each_signal_once(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = f"""
import os, signal, time
got = []
signal.signal({int(number)}, lambda *_: got.append(os.write(1, b"got it\\n")))
os.write(1, b"ready\\n")
while not got:
    time.sleep(0.02)
time.sleep(0.3)
"""
    process = subprocess.Popen(
        [*CONTAINED, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("got it\n", 0)


@pytest.mark.parametrize(
    "victim", first_quick(["the calling shell", "run_contained itself"])
)
def test_kill_9_of_run_contained_ends_its_command(victim: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    inner = f"{ORPHAN.format(pids=pids)}\necho $$ >> {pids}; sleep 1002 & echo $! >> {pids}; wait"
    shell = ["bash", "-c", f'"{CONTAINED[0]}" "{CONTAINED[1]}" bash -c "$INNER"; true']
    command = (
        shell if victim == "the calling shell" else [*CONTAINED, "bash", "-c", inner]
    )
    process = subprocess.Popen(command, env=os.environ | {"INNER": inner})
    everything = started(pids, 4)
    process.kill()
    process.wait()
    assert still_running(everything, within_s=60) == []


def test_a_command_deaf_to_term_is_killed_once_its_caller_is_gone(
    tmp_path: Path,
) -> None:
    pids = tmp_path / "pids"
    inner = f"trap '' TERM; echo $$ > {pids}; while true; do sleep 1; done"
    process = subprocess.Popen([*CONTAINED, "bash", "-c", inner])
    deaf = started(pids, 1)
    process.kill()
    process.wait()
    assert still_running(deaf, within_s=60) == []
