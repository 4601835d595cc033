"""Checks that the model can be served and trained: its files, the trainer's support,
its chat template.

`check_model` comes first. The other checks read the same folder and rely on it.
"""

import asyncio
from pathlib import Path

from invrl.algorithms.objectives.objectives import objective_needs
from invrl.cli.checks.machine import Machine
from invrl.errors import ConfigError, InvrlError
from invrl.gateway.config import GatewayConfig
from invrl.run.settings.config import Config
from invrl.run.settings.folder import starts_at_checkpoint
from invrl.run.settings.run_config import is_run_folder
from invrl.weights.config import ArenaWeights

_NO_LIMIT = 2**31
"""Vocabulary size that refuses no token id."""


def check_model(config: Config) -> Path:
    """Check that a model is given, that its files are those of a servable model, and
    that those in a run's checkpoint are what was written."""
    from invrl.families.registry import FAMILIES
    from invrl.run.checkpoints.checkpoint import check_served
    from invrl.user_code.model_folder import check_is_folder, check_model_folder

    if not config.model.model_path:
        fix = "give --model-path FOLDER; `invrl prepare-model --help` shows how to make one"
        raise ConfigError("model.model_path", "", "no model was given", fix)
    folder = config.model.folder
    check_is_folder("model.model_path", config.model.model_path, folder)
    if is_run_folder(folder):
        fix = "give a run that has saved a model, or the model that it began with"
        raise ConfigError(
            "model.model_path", str(folder), "a run that has saved no model yet", fix
        )
    check_model_folder(folder, families=FAMILIES)
    check_served(folder)
    return folder


def check_trainable(config: Config) -> str:
    """Check that the trainer computes exactly this model, and that its layout divides
    it. Returns the model's family."""
    from invrl.families.hf_config import read_hf_config
    from invrl.families.registry import FAMILIES
    from invrl.run.settings.served_adapters import served_adapter
    from invrl.train.adapters.peft_folder import check_start

    shape = read_hf_config(config.model.folder)
    config.train.check_model(
        shape, objective_needs(config.algorithm), config.algorithm.critic
    )
    lora = config.train.lora
    if lora is not None:
        if not starts_at_checkpoint(config):
            check_start(lora, lora.projections(shape))
        served_adapter(config)
    return f"{shape.model_type} ({FAMILIES[shape.model_type].models})"


def check_adapters(config: Config) -> str:
    """Check that the adapters that clients may choose are of the model, and that SGLang
    can serve them."""
    from invrl.run.settings.served_adapters import adapters_by_name

    adapters = adapters_by_name(config)
    if adapters is None:
        return "none"
    return f"{', '.join(adapters.folders)}; of rank {adapters.rank} at most"


def check_reference(config: Config) -> str:
    """Check that the frozen reference is other weights of the same model: its folder is
    sound, it has the same shape, and its tokens mean the same."""
    given = config.model.reference_model_path
    if not objective_needs(config.algorithm).reference:
        return "none: the objective does not need it"
    if not given:
        return "the weights of model_path"
    return _check_like_policy(
        config, "model.reference_model_path", given, config.model.reference_folder
    )


def check_critic(config: Config) -> str:
    """Check that the critic is another model of the policy's shape, whose tokens mean
    the same."""
    critic = config.algorithm.critic
    if not objective_needs(config.algorithm).values:
        return "none: the objective does not need it"
    if critic is None or critic.model_path is None:
        return "begins as the model of model_path"
    _check_like_policy(
        config, "critic.model_path", critic.model_path, config.critic_folder
    )
    return f"begins as the model of {config.critic_folder}"


def check_teacher(config: Config) -> str:
    """Check a teacher that the trainer computes like the frozen reference, and that one
    on a server answers now and makes the same tokens of the same text."""
    from invrl.run.loop.teacher import open_teacher
    from invrl.user_code.model_folder import read_tokenizer

    settings = config.algorithm.teacher
    folder = config.teacher_folder
    if folder is not None:
        advice = " (a teacher of another shape can be served: --teacher.url)"
        return _check_like_policy(
            config, "teacher.model_path", str(folder), folder, advice
        )
    teacher = open_teacher(config)
    if settings is None or teacher is None:
        return "none"
    model_name = asyncio.run(teacher.check(read_tokenizer(config.model.folder)))
    return f"{model_name} at {settings.url}"


def _check_like_policy(
    config: Config, field: str, given: str, folder: Path, advice: str = ""
) -> str:
    """Report where the weights are. Raises ConfigError unless the folder is sound, and
    its model has the policy's shape and the same tokens. `given`: the value of the
    field."""
    from invrl.families.hf_config import read_hf_config
    from invrl.families.registry import FAMILIES
    from invrl.run.checkpoints.checkpoint import check_served
    from invrl.user_code.model_folder import (
        check_is_folder,
        check_model_folder,
        read_tokenizer,
    )

    check_is_folder(field, given, folder)
    try:
        check_model_folder(folder, families=FAMILIES)
        check_served(folder)
    except ConfigError as error:
        raise ConfigError(field, given, error.reason, error.fix) from error
    policy_folder = config.model.folder
    fix = "give a folder of the same model as --model-path, for example the one that it was trained from"
    fix += advice
    differences = read_hf_config(policy_folder).differences(read_hf_config(folder))
    if differences:
        reason = (
            f"it differs from the model of --model-path in {', '.join(differences)}"
        )
        raise ConfigError(field, given, reason, fix)
    text_by_id = {
        token_id: text
        for text, token_id in read_tokenizer(policy_folder).get_vocab().items()
    }
    for text, token_id in read_tokenizer(folder).get_vocab().items():
        expected = text_by_id.get(token_id, text)
        if text != expected:
            reason = f"token {token_id} is {text!r} there and {expected!r} in the model of --model-path"
            raise ConfigError(field, given, reason, fix)
    return f"the weights of {folder}"


def check_servable(config: Config) -> None:
    """Check that the engine computes the same model as the trainer, by the known
    differences of its family, and that no tensor is missing: SGLang serves whatever is
    in the memory of such a one."""
    from invrl.families.hf_config import read_hf_config, unfitting_tensors
    from invrl.user_code.model_folder import tensor_files

    folder = config.model.folder
    model = read_hf_config(folder)
    model.check_served()
    reason = unfitting_tensors(model, tensor_files(folder))
    if reason:
        fix = "give a folder whose files belong together"
        raise ConfigError("model.model_path", str(folder), reason, fix)


def check_engine_here(config: Config, machine: Machine) -> None:
    """Check that SGLang can serve the family on this machine's GPU or CPU, that an
    engine's processes divide the model, and that the weight arena's device exists."""
    from invrl.families.registry import FAMILIES
    from invrl.user_code.model_folder import read_model_type

    model_type = str(read_model_type(config.model.folder))
    reason = FAMILIES[model_type].not_served_on_cpu
    if reason and machine.gpus == 0:
        fix = "use a machine with a GPU, or train on saved batches with --debug-train-only"
        raise ConfigError("model.model_path", model_type, reason, fix)
    _check_engine_ranks(config, machine)
    weights = config.weights
    needs_gpu = isinstance(weights, ArenaWeights) and weights.arena_device == "cuda"
    if needs_gpu and machine.gpus == 0:
        reason = "there is no GPU whose memory trainer and engines could share"
        raise ConfigError("weights.arena_device", "cuda", reason, "leave it out")


def _check_engine_ranks(config: Config, machine: Machine) -> None:
    """Check that an engine's processes divide the model's heads evenly. Several may
    share a key and value head."""
    from invrl.families.hf_config import read_hf_config

    ranks = config.engine.tp_size
    if ranks == 1:
        return
    shape = read_hf_config(config.model.folder)
    undivided: list[str] = []
    for name in ("num_attention_heads", "intermediate_size"):
        size = getattr(shape, name)
        if size % ranks:
            undivided.append(f"{name} {size}")
    # On a CPU SGLang adds heads of zeros where ranks would share one.
    shares_heads = ranks % shape.num_key_value_heads == 0 and machine.gpus > 0
    if shape.num_key_value_heads % ranks and not shares_heads:
        undivided.append(f"num_key_value_heads {shape.num_key_value_heads}")
    if undivided:
        reason = f"it does not divide the model's {', '.join(undivided)}"
        raise ConfigError(
            "engine.tp_size",
            ranks,
            reason,
            "give a divisor of them, or leave it out",
        )


def check_template(config: Config) -> None:
    """Render as the gateway does: a first request, and one that follows a reply. Load
    the named parsers."""
    folder = config.model.folder
    try:
        renders = _renders(folder, config.gateway)
        _load_parsers(config.gateway)
    except (ConfigError, ImportError):  # transformers imports jinja2 when it renders
        raise
    except Exception as error:
        # templates raise what they like, the tokenizer bare Exceptions
        raise _template_error(folder, config.gateway, error) from error
    if not renders:
        reason = "the chat template renders a conversation to nothing"
        fix = "choose an instruct model, or write another chat_template.jinja"
        raise ConfigError("model.model_path", str(folder), reason, fix)


def _renders(folder: Path, gateway: GatewayConfig) -> bool:
    """Whether both conversations become token ids."""
    from invrl.gateway.rendering.loading import load_renderer
    from invrl.gateway.types import Message, Prompt

    renderer = load_renderer(
        str(folder), _NO_LIMIT, chat_template=gateway.chat_template_path
    )
    question = Message(role="user", content="a word")
    reply = Message(role="assistant", content="a word")
    for messages in ((question,), (question, reply, question)):
        if not renderer.render_first(Prompt(messages=messages)):
            return False
    return True


def _load_parsers(gateway: GatewayConfig) -> None:
    from invrl.gateway.rendering.replies.parsers import named_parsers

    # SGLang's import is slow, so it is imported only for a parser that is named.
    named = [
        "none" if name == "auto" else name
        for name in (gateway.tool_call_parser, gateway.reasoning_parser)
    ]
    named_parsers(*named).preload()


def _template_error(
    folder: Path, gateway: GatewayConfig, error: Exception
) -> ConfigError:
    reason = f"no conversation renders: {error!r}"
    if isinstance(error, InvrlError):
        reason = str(error)
    if gateway.chat_template_path:
        fix = "repair it, or leave --chat-template-path out"
        return ConfigError(
            "gateway.chat_template_path", gateway.chat_template_path, reason, fix
        )
    fix = "repair chat_template.jinja (or chat_template in tokenizer_config.json)"
    return ConfigError("model.model_path", str(folder), reason, fix)
