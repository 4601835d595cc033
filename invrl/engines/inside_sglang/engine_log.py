"""Gives an engine's log the line format of our own processes: each line names the
engine, its process and the run.

SGLang takes a logging configuration from a file, in each of its processes. Output that
bypasses logging is unchanged. A user's own `SGLANG_LOGGING_CONFIG_PATH` takes
precedence.
"""

import json
import logging.config
import os
from pathlib import Path

from invrl.engines.inside_sglang.engine_instance import NAME_VARIABLE
from invrl.host.output.log_lines import CHATTY_LOGGERS, LineFormatter, LogSettings

_CONFIG_PATH = "SGLANG_LOGGING_CONFIG_PATH"
"""SGLang's own variable."""
_SETTINGS = "INVRL_ENGINE_LOG"
_FORMATTER = "invrl.engines.inside_sglang.engine_log.EngineLineFormatter"
_TITLE_PREFIX = "sglang::"
"""Prefix of the titles that SGLang gives its processes, such as
`sglang::scheduler_TP0`."""


class EngineLineFormatter(LineFormatter):
    """Formatter for one process of the engine that the environment describes."""

    def __init__(self, **_: object) -> None:
        """Ignore all arguments: SGLang passes uvicorn's formatters some."""
        import setproctitle  # a dependency of SGLang

        name = os.environ[NAME_VARIABLE]
        title = setproctitle.getproctitle()
        if title.startswith(_TITLE_PREFIX):
            name += "/" + title.removeprefix(_TITLE_PREFIX)
        super().__init__(name, LogSettings.model_validate_json(os.environ[_SETTINGS]))


def log_environment(
    settings: LogSettings, *, level: str, folder: Path
) -> dict[str, str]:
    """Return the environment that gives an engine such a log, from `level` on (SGLang's
    `log_level`). The engine's name is in `NAME_VARIABLE`. Writes a file into `folder`,
    which must exist as long as the engine does."""
    if _CONFIG_PATH in os.environ:
        return {}
    path = folder / "logging.json"
    path.write_text(json.dumps(_logging_config(level)), encoding="utf-8")
    return {_SETTINGS: settings.model_dump_json(), _CONFIG_PATH: str(path)}


def log_in_lines() -> None:
    """Configure logging. Call this in an engine's HTTP process before it imports
    SGLang, which warns before it configures its logs."""
    if _SETTINGS not in os.environ:
        return
    from uvicorn.config import LOGGING_CONFIG

    logging.config.dictConfig(
        json.loads(Path(os.environ[_CONFIG_PATH]).read_text(encoding="utf-8"))
    )
    logging.captureWarnings(True)
    for name in ("default", "access"):
        LOGGING_CONFIG["formatters"][name] = {"()": _FORMATTER}


def _logging_config(level: str) -> dict[str, object]:
    """Return the argument for `logging.config.dictConfig`."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": _FORMATTER}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "lines"}
        },
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {name: {"level": "WARNING"} for name in CHATTY_LOGGERS},
    }
