"""Keeps the keys of our private servers out of logs and answers.

SGLang logs all of its arguments at level info, keys among them, and answers `/server_info` with them.
"""

import functools
import logging
import re
from typing import Any

_KEY = re.compile(r"""(api[_-]key\w*["']?\s*[:=]\s*)(["']?)(?!None\b)[^"',\s)}]+""")
_HIDDEN = r"\1\2(not shown)"
_KEY_FIELDS = ("api_key", "admin_api_key")


def without_keys(text: str) -> str:
    """`text` without the values of everything that is called an API key."""
    return _KEY.sub(_HIDDEN, text)


def mask_keys_in_logs() -> None:
    """Mask keys in every log record of this process from now on."""
    make_record = logging.getLogRecordFactory()

    def make_masked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # logging itself reports what is wrong with its arguments
            return record
        masked = without_keys(message)
        if masked != message:
            record.msg = masked
            record.args = ()
        return record

    logging.setLogRecordFactory(make_masked)


def hide_keys_in_answers() -> None:
    """To be called in an engine's HTTP process before it serves. Imports SGLang."""
    from sglang.srt.server_args import ServerArgs

    resolved_dict = ServerArgs.resolved_dict

    @functools.wraps(resolved_dict)
    def without_key_fields(self: ServerArgs) -> dict[str, Any]:
        settings = resolved_dict(self)
        return {name: value for name, value in settings.items() if name not in _KEY_FIELDS}

    def launch_command(self: ServerArgs) -> str | None:
        command = getattr(self, "_launch_command", None)
        return without_keys(command) if command else command

    server_args_class: Any = ServerArgs
    server_args_class.resolved_dict = without_key_fields
    server_args_class.launch_command = property(launch_command)
