"""Keeps the keys of our private servers out of logs.

SGLang logs all of its arguments at level info, keys among them.
"""

import logging
import re
from typing import Any

_KEY = re.compile(r"""(api[_-]key\w*["']?\s*[:=]\s*)(["']?)(?!None\b)[^"',\s)}]+""")
_HIDDEN = r"\1\2(not shown)"


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
