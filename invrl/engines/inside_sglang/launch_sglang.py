"""`python -m invrl.engines.inside_sglang.launch_sglang <SGLang's flags>`: starts a real
SGLang server, also on CPU.

Invariant: `prepare_process` runs at module level, because SGLang's spawned processes
(scheduler, detokenizer) import the main module again and need it too. The server starts
only under the `__main__` guard. On a CPU these processes are forked, and the server is
forked from a process that has imported SGLang (`host/processes/fork_parent.py`).

An engine listens only on loopback, except for its HTTP process if configured. Torch's
rendezvous would open a store without a key on every interface, so an engine's ranks get
a store in a file, and an engine of one rank a store in memory.

SGLang writes the load of its scheduler into a file of /dev/shm that nobody removes.
Here the file is in the engine's TMPDIR, which is removed with the engine.

On CUDA `sglang_on_cpu` does nothing. The shorter imports (no garbage collection, no
Megatron, our families' classes first) apply there too.
"""

import functools
import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from invrl.engines.inside_sglang.adapter_loads import reply_with_checksums
from invrl.engines.inside_sglang.adapter_routes import add_adapter_routes
from invrl.engines.inside_sglang.atomic_weight_load import (
    leave_unpacked_modules,
    load_in_one_step,
)
from invrl.engines.inside_sglang.cache_flush import keep_memory_in_flushes
from invrl.engines.inside_sglang.canary_priority import put_canaries_first
from invrl.engines.inside_sglang.engine_identity import add_identity_route
from invrl.engines.inside_sglang.engine_instance import add_instance_header
from invrl.engines.inside_sglang.engine_log import log_in_lines
from invrl.engines.inside_sglang.engine_routes import add_routes
from invrl.engines.inside_sglang.engine_traces import FLAG, send_spans_over_http
from invrl.engines.inside_sglang.event_versions import report_versions_in_every_event
from invrl.engines.inside_sglang.kv_cache_versions import separate_kv_of_versions
from invrl.engines.inside_sglang.request_labels import read_labels
from invrl.engines.inside_sglang.server_info_keys import hide_keys_in_responses
from invrl.host import sglang_on_cpu
from invrl.host.output.masked_keys import mask_keys_in_logs

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_ADAPTERS = "--enable-lora"
"""SGLang's flag of an engine that serves adapters."""
_RENDEZVOUS = "invrl-engine"


def prepare_process() -> None:
    """Prepare the imports. Call this in every process of an engine that has not been
    forked, before it imports SGLang."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # SGLang's dumper would import it: 1.5 s
    os.environ.setdefault(
        "SGLANG_EXTERNAL_MODEL_PACKAGE", "invrl.engines.sglang_models"
    )
    sglang_on_cpu.leave_uncompiled()
    sglang_on_cpu.make_importable()
    mask_keys_in_logs()
    _stay_on_loopback()


def _stay_on_loopback() -> None:
    """Listen only on loopback. Call this before SGLang makes its process group."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(_RENDEZVOUS, _rendezvous)
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"{_RENDEZVOUS}://engine"
    # Gloo and NCCL listen even without peers, by default on the host name's address.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def _rendezvous(url: str, **_: object) -> "Iterator[tuple[Store, int, int]]":
    """Rendezvous handler for torch: (store, rank, world size). The ranks of an engine
    meet in a file of its TMPDIR."""
    from urllib.parse import parse_qs, urlsplit

    from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage]

    query = parse_qs(urlsplit(url).query)
    world_size = int(query["world_size"][0])
    if world_size == 1:
        yield HashStore(), 0, 1
    else:
        store = FileStore(f"{tempfile.gettempdir()}/rendezvous", world_size)
        yield store, int(query["rank"][0]), world_size


def _change_scheduler() -> None:
    """Patch the scheduler. Call this in every process of an engine that has not been
    forked, once SGLang may be imported."""
    _load_tokenizer_once()
    _keep_load_in_tmpdir()
    keep_memory_in_flushes()
    separate_kv_of_versions()
    report_versions_in_every_event()
    put_canaries_first()
    load_in_one_step()
    leave_unpacked_modules()


def _load_tokenizer_once() -> None:
    """Cache the tokenizer, which SGLang loads four times, half a CPU-second each.
    Forked processes share it."""
    from sglang.srt.utils import hf_transformers_utils

    hf_transformers_utils.get_tokenizer = functools.cache(
        hf_transformers_utils.get_tokenizer
    )


def _keep_load_in_tmpdir() -> None:
    from sglang.srt.managers import load_snapshot

    def load_path(instance_id: str) -> str:
        return f"{tempfile.gettempdir()}/load-{instance_id}"

    load_snapshot.shm_path_for = load_path


def prepare() -> None:
    """Import SGLang, in the process that forks engines."""
    prepare_process()
    import_sglang()


def main(flags: Sequence[str]) -> None:
    """Serve one engine, in a forked process."""
    log_in_lines()
    serve(flags)


def import_sglang() -> None:
    """Import and patch what every engine's server needs."""
    # Until everything is imported: collecting garbage among 7,000 modules took 3
    # CPU-seconds.
    gc.disable()
    _change_scheduler()
    from sglang.launch_server import run_server  # noqa: F401
    from sglang.srt.entrypoints import http_server  # noqa: F401

    hide_keys_in_responses()
    add_identity_route()
    add_routes()
    add_instance_header()
    read_labels()
    sglang_on_cpu.fork_children()
    gc.freeze()  # children share this memory until it is written, as a collection does
    gc.enable()


def serve(flags: Sequence[str]) -> None:
    """Serve until the engine ends, in a process that has imported SGLang. `flags`:
    SGLang's."""
    if "--enable-deterministic-inference" in flags:
        sglang_on_cpu.support_seeds()
    if "--enable-return-routed-experts" in flags:
        sglang_on_cpu.support_routed_experts()
    if _ADAPTERS in flags:
        sglang_on_cpu.support_adapters()
        reply_with_checksums()
        add_adapter_routes()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import hf_transformers_utils, kill_process_tree

    # Keys come from the environment, which other users of the machine cannot read.
    key_flags = os.environ.pop("INVRL_KEY_FLAGS", "").split()
    args: Any = prepare_server_args([*flags, *key_flags])
    hf_transformers_utils.get_tokenizer(
        args.tokenizer_path or args.model_path,
        tokenizer_mode=args.tokenizer_mode,
        trust_remote_code=args.trust_remote_code,
        revision=args.revision,
        tokenizer_backend=args.tokenizer_backend,
    )
    try:
        run_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    if __name__ == "__main__":
        log_in_lines()
    if FLAG in sys.argv:
        send_spans_over_http()
    prepare_process()

if __name__ == "__mp_main__":
    _change_scheduler()
    if _ADAPTERS in sys.argv:
        reply_with_checksums()

if __name__ == "__main__":
    import_sglang()
    serve(sys.argv[1:])
