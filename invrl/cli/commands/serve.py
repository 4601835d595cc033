"""`invrl serve`: engines, router and gateway without a trainer, for any agent.

The first session is for the person at the terminal; the environment key opens more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import TYPE_CHECKING

from invrl.cli.run_process import checked_configuration, failure_reported, log_to_folder
from invrl.engines.client.sglang_client import EngineLimits
from invrl.engines.launch.engine_server import count_gpus, max_total_tokens
from invrl.host.files.disk_waits import watch_disks
from invrl.host.files.temporary_folder import remove_abandoned
from invrl.host.output.incidents import incidents_shown
from invrl.host.output.printable import printable
from invrl.host.output.wait_lines import print_waits
from invrl.host.processes import interrupts
from invrl.run.processes.background import in_background
from invrl.run.processes.phase_progress import StartingParts
from invrl.run.settings.config import Config
from invrl.run.settings.folder import hold_run_folder
from invrl.store.run_folder import RunFolder
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.sessions import Session
from invrl.types.tasks import Task

if TYPE_CHECKING:
    from invrl.run.processes.serving import Serving


def serve(arguments: Sequence[str]) -> None:
    """usage: invrl serve --model-path FOLDER [flags]

    Starts engines, router and gateway; prints the base URL, an environment key and a
    session key that is ready to use.

    example:
      invrl serve --model-path MODEL --gateway.port 8000
      invrl serve --model-path MODEL --adapter sums=PEFT_FOLDER --adapter words=PEFT_FOLDER"""
    config = checked_configuration(arguments, command="serve")
    # No supervisor: this command starts no Ray, and the kernel (or the guardian) ends
    # what it starts.
    with hold_run_folder(config, "serve") as folder:
        log_to_folder(folder, config)
        with failure_reported(folder):
            interrupts.run(serve_model(config, folder))


async def serve_model(config: Config, folder: RunFolder) -> None:
    """Serve until Ctrl-C. Raises what start-up raises, or ServerError when no engine is
    left and none comes back."""
    async with serving_model(config, folder) as serving:
        [session] = await open_sessions(serving, 1)
        print(welcome(serving, session), flush=True)
        await serving.watch()


@asynccontextmanager
async def serving_model(config: Config, folder: RunFolder) -> AsyncIterator[Serving]:
    """Start engines, router and gateway, and yield them once they are up."""
    from invrl.run.processes.gpu_plan import plan_engines
    from invrl.run.processes.served_metrics import ServedMetrics
    from invrl.run.processes.serving import start_serving
    from invrl.run.processes.tokenizer import keep_tokenizer
    from invrl.run.settings.served_adapters import adapters_by_name

    remove_abandoned()
    keep_tokenizer(config, folder)
    gpus = plan_engines(config, count_gpus())
    if gpus is not None:
        print(f"GPUs: {gpus}", flush=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(
            incidents_shown(lambda line: print(printable(line), flush=True))
        )
        await stack.enter_async_context(in_background(watch_disks(folder.path)))
        metrics = stack.enter_context(closing(ServedMetrics(config, folder, "serve")))
        serving = await stack.enter_async_context(
            start_serving(
                with_long_answers(config),
                folder,
                gpus=gpus,
                adapter=adapters_by_name(config),
            )
        )
        print(
            f"starting {config.engine.described} behind {serving.fleet.router.program}; "
            f"run folder {folder.path}",
            flush=True,
        )
        starting = StartingParts()
        with print_waits(starting.awaited):
            await starting.wait_until_up(
                f"engines and gateway ({folder.path / 'logs'})", serving.wait_ready()
            )
        await serving.fleet.check_unchanged()
        await serving.fleet.admit()
        serving.fleet.restart_evicted()
        stack.enter_context(metrics.of_serving(serving))
        if metrics.message:
            print(metrics.message, flush=True)
        yield serving


def with_long_answers(config: Config) -> Config:
    """Let a reply be as long as the context unless `max_new_tokens` is set: files of an
    agent that names no limit must not be cut off."""
    if "max_new_tokens" in config.rollout.model_fields_set:
        return config
    limits = EngineLimits.of(
        config.model.folder, max_total_tokens=max_total_tokens(config.engine)
    )
    unbounded = {"max_new_tokens": limits.context_length}
    return config.model_copy(
        update={"rollout": config.rollout.model_copy(update=unbounded)}
    )


async def open_sessions(serving: Serving, count: int) -> list[Session]:
    """Open sessions of a task without a run."""
    from invrl.rollout.workers.session_client import SessionClient

    client = SessionClient(serving.gateway.url, env_key=serving.env_key)
    task = Task(id="terminal", payload={})
    members = tuple(GroupMember(index=index, attempt=0) for index in range(count))
    lease = GroupLease(group_id="terminal", task=task, members=members)
    try:
        return await client.open(lease, purpose="serve")
    finally:
        await client.close()


def welcome(serving: Serving, session: Session) -> str:
    """Return the instructions for pointing an agent at the gateway."""
    url = serving.settings.url
    model = serving.settings.model_name
    adapters = "".join(f", {name}" for name in serving.settings.adapters)
    return f"""
serving {model}{adapters} ({serving.settings.model_path}); Ctrl-C ends it

  OPENAI_BASE_URL={session.base_url}
  OPENAI_API_KEY={session.key}
  ANTHROPIC_BASE_URL={session.base_url.removesuffix("/v1")}
  ANTHROPIC_API_KEY={session.key}
  GOOGLE_GEMINI_BASE_URL={session.base_url.removesuffix("/v1")}
  GEMINI_API_KEY={session.key}

try it:
  curl -s {session.base_url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

more sessions (the environment key opens them; keep it to yourself):
  INVRL_ENV_KEY={serving.env_key}
  curl -s {url}/sessions -H "Authorization: Bearer $INVRL_ENV_KEY" -H 'Content-Type: application/json' \\
    -d '{{"task_id": "a", "group_id": "a", "members": [{{"index": 0, "attempt": 0}}], "purpose": "serve"}}'
"""
