"""Keeps the keys of our private servers out of an engine's responses.

SGLang responds to `/server_info` with all of its arguments, keys among them. (It logs
them too, see `host/output/masked_keys.py`.)"""

import functools
from typing import Any

from invrl.host.output.masked_keys import without_keys

_KEY_FIELDS = ("api_key", "admin_api_key")


def hide_keys_in_responses() -> None:
    """Hide the keys. Call this in an engine's HTTP process before it serves. Imports
    SGLang."""
    from sglang.srt.server_args import ServerArgs

    resolved_dict = ServerArgs.resolved_dict

    @functools.wraps(resolved_dict)
    def without_key_fields(self: ServerArgs) -> dict[str, Any]:
        settings = resolved_dict(self)
        return {
            name: value for name, value in settings.items() if name not in _KEY_FIELDS
        }

    def launch_command(self: ServerArgs) -> str | None:
        command = getattr(self, "_launch_command", None)
        return without_keys(command) if command else command

    server_args_class: Any = ServerArgs
    server_args_class.resolved_dict = without_key_fields
    server_args_class.launch_command = property(launch_command)
