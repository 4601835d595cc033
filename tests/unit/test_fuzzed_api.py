"""The gateway under generated requests: schemathesis on what OpenAPI shows, hypothesis on the dialects.

Both are bounded and seeded: a failure comes back in the next run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from test_gateway_turns import ENV_KEY, model, renderer, running  # noqa: F401

from invrl.gateway.rendering import Renderer
from invrl.lease_store import LeaseStore
from invrl.types import GroupLease, GroupMember, Task

EXAMPLES = os.environ.get("INVRL_FUZZ_EXAMPLES", "40")
"""Generated requests per operation and phase; more by hand."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


async def test_what_openapi_shows_holds_for_generated_requests(
    tmp_path: Path,
    model: Path,  # noqa: F811
    renderer: Renderer,  # noqa: F811
):
    """Each operation on open sessions of its own, one that is closed, and one that is not there."""
    async with running(tmp_path, model, renderer, leases=True, max_open_sessions=1000) as gateway:
        store, member = LeaseStore(tmp_path / "run.db"), GroupMember(index=0, attempt=0)
        for number in range(300):  # a lease that has to wait takes up to a minute
            task = Task(id=f"t{number}", payload={}, label="", split="train")
            store.offer(GroupLease(group_id=f"g{number}", task=task, members=(member,)))
        [closed] = await gateway.open(purpose="serve")
        await gateway.finish(closed)
        schema = (await gateway.http.get(gateway.url + "/openapi.json")).json()
        for path in schema["paths"].values():
            for operation in path.values():
                own = [session.id for session in await gateway.open(members=4, purpose="serve")]
                for parameter in operation.get("parameters", ()):
                    parameter["schema"] |= {"enum": [*own, closed.id, "ses-nobody"]}
        (tmp_path / "openapi.json").write_text(json.dumps(schema))
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", gateway.url),
            *("-H", f"Authorization: Bearer {ENV_KEY}", "--generation-with-security-parameters", "false"),
            *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--continue-on-failure"),
            *("--generation-deterministic", "--max-examples", EXAMPLES, "--max-failures", "20"),
            *("--report-json-path", "report.json", "--no-color", "--no-shrink", "--warnings", "off"),
        ]
        run = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            told, _ = await asyncio.wait_for(run.communicate(), 300)
        finally:
            if run.returncode is None:
                run.kill()
        store.close()
        assert run.returncode == 0, told.decode()[-6000:]
        accepted = json.loads((tmp_path / "report.json").read_text())["valid_rates"]
        assert len(accepted) == sum(len(path) for path in schema["paths"].values())
        assert all(sum(each["accepted"] for each in phases.values()) for phases in accepted.values()), (
            accepted
        )
