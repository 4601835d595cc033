"""Help for the flags that are settings: the most important ones first, then every
section, 100 columns wide."""

import textwrap
from typing import Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from invrl.cli.command_settings import settings_for_command
from invrl.cli.flags import CONFIG_FLAG, SETTING_FLAGS, SettingFlag
from invrl.cli.presets import preset_names
from invrl.run.settings.config import SECTIONS, TABLES, table_model
from invrl.types.section import is_optional, present_type

_FIRST_SETTINGS = {
    "train": (
        "model_path",
        "rollout_function_path",
        "task_file",
        "reward_function_path",
        "num_steps",
        "rollout_batch_size",
        "n_samples_per_prompt",
        "max_new_tokens",
        "lr",
        "run_name",
    ),
    "eval": (
        "model_path",
        "rollout_function_path",
        "reward_function_path",
        "task_file",
        "eval.sets",
        "eval.tasks",
        "eval.samples_per_task",
        "max_new_tokens",
        "run_name",
    ),
    "engine": (
        "model_path",
        "engine.dtype",
        "engine.tp_size",
        "engine.max_total_tokens",
    ),
    "serve": (
        "model_path",
        "gateway.host",
        "gateway.port",
        "num_engines",
        "temperature",
        "max_new_tokens",
        "chat_template_path",
        "run_name",
    ),
}
"""Settings of a first run, in the order in which a user thinks of them. Other commands:
as `train`."""
_PACKAGE_HELP = {
    "sglang": "SGLang's ServerArgs, for example --sglang-chunked-prefill-size 512",
    "router": "sglang-router's arguments, or those of smg, for example --router-policy manual",
    "megatron": "fields of its Transformer-, DistributedDataParallel- and OptimizerConfig",
}
_WIDTH = 100
_TEXT_COLUMN = 36


def flag_help(command: str = "train") -> str:
    """Describe every flag of the command with its default."""
    first = _first_settings(command)
    lines = ["sources:"]
    presets = ", ".join(preset_names())
    config_text = f"TOML file; its tables are the sections below, flags win over it. Or a preset: {presets}"
    lines += _entry(f"{CONFIG_FLAG} FILE", config_text)
    lines += [
        "",
        "settings to start with (the table in brackets is where a TOML file has them; --no-X leaves out",
        "an optional one that a file or a preset sets):",
    ]
    for setting in first:
        lines += _setting_entry(setting, prefix=f"[{setting.table}] ")
    used = settings_for_command(command)
    for table in (*SECTIONS, *TABLES):
        others = [
            setting
            for setting in SETTING_FLAGS
            if setting.table == table
            and used.uses(table, setting.key)
            and setting not in first
        ]
        if others:
            model = table_model(table)
            paragraph = ((model and model.__doc__) or "").split("\n\n")[0]
            summary = " ".join(paragraph.split())
            lines += ["", *textwrap.wrap(f"[{table}] {summary}", _WIDTH)]
            for setting in others:
                lines += _setting_entry(setting)
    lines += ["", "options of other packages (checked against the installed version):"]
    for package in used.packages:
        lines += _entry(f"--{package}-*", _PACKAGE_HELP[package])
    if used.uses("plugin", ""):
        lines += _entry(
            "--plugin.NAME.SETTING",
            "a setting of user code, by the name after its colon",
        )
    return "\n".join(lines)


def _first_settings(command: str) -> list[SettingFlag]:
    keys = _FIRST_SETTINGS.get(command, _FIRST_SETTINGS["train"])
    by_name = {setting.name: setting for setting in SETTING_FLAGS}
    return [by_name[key] for key in keys]


def _setting_entry(setting: SettingFlag, *, prefix: str = "") -> list[str]:
    names = f"{setting.flag} {_placeholder(setting)}"
    if not setting.takes_value:
        names = f"{setting.flag}, {setting.negative_flag}"
    elif is_optional(setting.field) and setting.field.default is not None:
        names += f", {setting.negative_flag}"
    text = f"{prefix}{setting.field.description}"
    default = _default(setting)
    if default:
        text += f" (default: {default})"
    return _entry(names, text)


def _default(setting: SettingFlag) -> str:
    """Return the default as the flag would be written; empty if there is none."""
    default = setting.field.default
    if default is None or default is PydanticUndefined:
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(str(part) for part in default)
    return str(default)


def _placeholder(setting: SettingFlag) -> str:
    """Return the placeholder for the value: the choices, or the type."""
    annotation = present_type(setting.field)
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    if get_origin(annotation) is tuple:
        return "A,B"
    if get_origin(annotation) is Union:  # a number, or one of some words
        words = get_args(get_args(annotation)[-1])
        return "|".join(("N", *words))
    if annotation is int:
        return "N"
    if annotation is float:
        return "X"
    return "TEXT"


def _entry(names: str, text: str) -> list[str]:
    """Return the names on the left and the text on the right; long names have separate
    lines."""
    head = f"  {names}"
    indent = " " * _TEXT_COLUMN
    lines = textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    if len(head) > _WIDTH:
        head_lines = textwrap.wrap(
            head.replace(",", ", "), _WIDTH, subsequent_indent="      "
        )
        return [*head_lines, *lines]
    if len(head) > _TEXT_COLUMN - 2:
        return [head, *lines]
    first_line = head.ljust(_TEXT_COLUMN) + lines[0][_TEXT_COLUMN:]
    return [first_line, *lines[1:]]
