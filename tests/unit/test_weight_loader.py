"""Where checkpoint tensors live in the engine's fused parameters, and what does not
fit."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.loader import weight_loader
from invrl.weights.loader.loader_messages import LoaderRequest, read_reply
from invrl.weights.loader.parameter_places import plan
from invrl.weights.loader.weight_loader import run
from invrl.weights.tensors import engine_parameters
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.transports import arena
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter
from invrl.weights.transports.buckets import bucket_names
from invrl.weights.transports.slot_layout import SlotLayout, slot_layout
from invrl.weights.transports.slot_lease import SlotLease

SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.self_attn.k_proj.bias": (2,),
    "model.layers.0.self_attn.v_proj.bias": (2,),
    "model.layers.0.self_attn.o_proj.weight": (4, 8),
    "model.layers.0.mlp.gate_proj.weight": (6, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 6),
    "model.layers.1.mlp.gate.weight": (2, 4),
    "model.layers.1.mlp.experts.0.gate_proj.weight": (3, 4),
    "model.layers.1.mlp.experts.0.up_proj.weight": (3, 4),
    "model.layers.1.mlp.experts.0.down_proj.weight": (4, 3),
    "model.layers.1.mlp.experts.1.gate_proj.weight": (3, 4),
    "model.layers.1.mlp.experts.1.up_proj.weight": (3, 4),
    "model.layers.1.mlp.experts.1.down_proj.weight": (4, 3),
    "model.norm.weight": (4,),
}
SPECS = [
    TensorSpec(name=name, shape=shape, dtype="float32")
    for name, shape in SHAPES.items()
]
OFFSETS = slot_layout(tuple(SPECS)).offsets


def engine() -> dict[str, torch.Tensor]:
    """Fused as SGLang fuses them, the vocabulary padded to 16."""
    return {
        "model.embed_tokens.weight": torch.zeros(16, 4),
        "model.layers.0.self_attn.qkv_proj.weight": torch.zeros(12, 4),
        "model.layers.0.self_attn.qkv_proj.bias": torch.zeros(12),
        "model.layers.0.self_attn.o_proj.weight": torch.zeros(4, 8),
        "model.layers.0.mlp.gate_up_proj.weight": torch.zeros(12, 4),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(4, 6),
        "model.layers.1.mlp.gate.weight": torch.zeros(2, 4),
        "model.layers.1.mlp.experts.w13_weight": torch.zeros(2, 6, 4),
        "model.layers.1.mlp.experts.w2_weight": torch.zeros(2, 4, 3),
        "model.norm.weight": torch.zeros(4),
    }


def model(parameters: dict[str, torch.Tensor], modules: tuple[object, ...] = ()):
    return types.SimpleNamespace(
        named_parameters=lambda: parameters.items(), modules=lambda: modules
    )


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
    }


def ask(
    parameters: dict[str, torch.Tensor], tmp_path: Path, tensors=tuple(SPECS), **fields
):
    return ask_model(model(parameters), tmp_path, tensors, **fields)


def run_request(served, request: LoaderRequest) -> None:
    encoded = msgspec.json.encode(request).decode()
    no_tensor = torch.empty(0)
    with torch.inference_mode():  # as in SGLang's scheduler
        run(served, [(encoded, no_tensor)])


def ask_model(served, tmp_path: Path, tensors=tuple(SPECS), **fields):
    request = LoaderRequest(
        reply_path=str(tmp_path / "reply"), tensors=tensors, **fields
    )
    run_request(served, request)
    return read_reply(request.reply_path)


def stage(writer: ArenaWriter, version: int, seed: int) -> StagedWeights:
    return writer.stage(WeightVersion(version), values(seed).items())


def handle_of(staged: StagedWeights) -> ArenaHandle:
    return msgspec.json.decode(staged.handle, type=ArenaHandle)


def test_load_puts_every_tensor_into_its_rows_and_digest_reads_them_back(
    tmp_path: Path,
) -> None:
    parameters = engine()
    writer = ArenaWriter(tuple(SPECS))
    staged = stage(writer, 1, seed=0)
    handle = handle_of(staged)
    closed = ArenaHandle(path="/proc/self/fd/987654", inode=handle.inode, slot=0)
    another = ArenaHandle(path=handle.path, inode=handle.inode + 1, slot=0)
    # refused, not raised inside the engine
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        ask(parameters, tmp_path, arena=closed)
    with pytest.raises(WeightSyncError, match="is another one"):
        ask(parameters, tmp_path, arena=another)
    loaded = ask(parameters, tmp_path, arena=handle)
    expected = values()

    def fused(*names: str) -> torch.Tensor:
        return torch.cat([expected[name] for name in names])

    attention = "model.layers.0.self_attn"
    for kind in ("weight", "bias"):
        assert torch.equal(
            parameters[f"{attention}.qkv_proj.{kind}"],
            fused(
                f"{attention}.q_proj.{kind}",
                f"{attention}.k_proj.{kind}",
                f"{attention}.v_proj.{kind}",
            ),
        )
    mlp = "model.layers.0.mlp"
    assert torch.equal(
        parameters[f"{mlp}.gate_up_proj.weight"],
        fused(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
    )
    experts = "model.layers.1.mlp.experts"
    for number in range(2):
        expert = f"{experts}.{number}"
        assert torch.equal(
            parameters[f"{experts}.w13_weight"][number],
            fused(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"),
        )
        assert torch.equal(
            parameters[f"{experts}.w2_weight"][number],
            expected[f"{expert}.down_proj.weight"],
        )
    embedding = "model.embed_tokens.weight"
    assert torch.equal(parameters[embedding][:10], expected[embedding])
    checksums = {name: checksum(tensor) for name, tensor in expected.items()}
    assert dict(staged.checksums) == checksums
    assert loaded.checksums == checksums
    assert ask(parameters, tmp_path, digest=True).checksums == checksums


class TestThePlanThatIsKept:
    """From one request to the next, while layout and parameters stay as they are."""

    @pytest.fixture(autouse=True)
    def _count_plans(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans = 0

        def counted(*arguments):
            self.plans += 1
            return plan(*arguments)

        monkeypatch.setattr(weight_loader, "plan", counted)

    def test_plan_of_the_layout_check_serves_the_loads(self, tmp_path: Path) -> None:
        writer = ArenaWriter(tuple(SPECS))
        served = model(engine())
        ask_model(served, tmp_path)
        for version in (1, 2, 3):
            staged = stage(writer, version, seed=version)
            loaded = ask_model(served, tmp_path, arena=handle_of(staged))
            assert loaded.checksums == dict(staged.checksums)
            digested = ask_model(served, tmp_path, digest=True)
            assert digested.checksums == dict(staged.checksums)
        assert self.plans == 1

    @pytest.mark.parametrize("fault", ["rows", "dtype", "name", "missing"])
    def test_other_layout_is_checked_and_refused_before_a_byte_moves(
        self, fault: str, tmp_path: Path
    ) -> None:
        writer = ArenaWriter(tuple(SPECS))
        parameters = engine()
        served = model(parameters)
        handle = handle_of(stage(writer, 1, seed=1))
        ask_model(served, tmp_path, arena=handle)
        *others, last = SPECS
        other = {
            "rows": (*others, replace(last, shape=(3,))),
            "dtype": (*others, replace(last, dtype="bfloat16")),
            "name": (*others, replace(last, name="other")),
            "missing": tuple(others),
        }[fault]
        stage(writer, 1, seed=2)
        with pytest.raises(LayoutError):
            ask_model(served, tmp_path, other, arena=handle)
        expected = values(1)
        for name, place in plan(parameters, SPECS).items():
            assert torch.equal(place, expected[name])

    def test_tensors_in_another_order_are_planned_anew(self, tmp_path: Path) -> None:
        """The slot of such a layout has other places."""
        served = model(engine())
        for layout in (tuple(SPECS), tuple(reversed(SPECS)), tuple(SPECS)):
            staged = stage(ArenaWriter(layout), 1, seed=1)
            loaded = ask_model(served, tmp_path, layout, arena=handle_of(staged))
            assert loaded.checksums == dict(staged.checksums)
        assert self.plans == 3

    @pytest.mark.parametrize("replaces", ["the tensor", "its memory"])
    def test_parameter_that_has_moved_is_found(
        self, replaces: str, tmp_path: Path
    ) -> None:
        writer = ArenaWriter(tuple(SPECS))
        parameters = engine()
        served = model(parameters)
        ask_model(served, tmp_path, arena=handle_of(stage(writer, 1, seed=1)))
        name = "model.layers.0.mlp.gate_up_proj.weight"
        if replaces == "the tensor":
            parameters[name] = torch.zeros(12, 4)
        else:
            parameters[name].data = torch.zeros(12, 4)
        staged = stage(writer, 2, seed=2)
        loaded = ask_model(served, tmp_path, arena=handle_of(staged))
        assert loaded.checksums == dict(staged.checksums)
        assert ask_model(served, tmp_path, digest=True).checksums == loaded.checksums
        up = values(2)["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(parameters[name][6:], up)
        assert self.plans == 2

    def test_parameter_of_another_shape_is_refused(self, tmp_path: Path) -> None:
        parameters = engine()
        served = model(parameters)
        ask_model(served, tmp_path)
        norm = parameters["model.norm.weight"]
        norm.data = norm.data.view(2, 2)
        with pytest.raises(LayoutError, match="does not fit"):
            ask_model(served, tmp_path)

    def test_engine_that_aliases_the_slot_frees_its_own_memory(
        self, tmp_path: Path
    ) -> None:
        parameters = engine()
        norm = np.zeros(4, np.float32)
        parameters["model.norm.weight"] = torch.from_numpy(norm)
        own_memory = weakref.ref(norm)
        del norm
        served = model(parameters)
        ask_model(served, tmp_path)
        handle = handle_of(stage(ArenaWriter(tuple(SPECS)), 1, seed=1))
        ask_model(served, tmp_path, arena=handle, alias=True)
        gc.collect()
        assert own_memory() is None


def wrong_names(staged: StagedWeights, checksums: Mapping[str, str]) -> list[str]:
    return [
        name for name, value in staged.checksums.items() if checksums[name] != value
    ]


def test_copy_finds_a_flipped_bit_in_the_slot(tmp_path: Path) -> None:
    writer = ArenaWriter(tuple(SPECS))
    staged = stage(writer, 1, seed=0)
    handle = handle_of(staged)
    slot = writer._slots[handle.slot]
    slot["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[5, 3] ^= 4
    loaded = ask(engine(), tmp_path, arena=handle)
    assert wrong_names(staged, loaded.checksums) == [
        "model.layers.0.mlp.up_proj.weight"
    ]


def test_only_the_digest_finds_a_parameter_changed_after_the_copy(
    tmp_path: Path,
) -> None:
    """The hook stands for whatever writes into an engine's memory: it runs after the
    copy."""
    parameters = engine()
    norm = parameters["model.norm.weight"]
    served = model(parameters)
    served.post_load_weights = lambda: norm.view(torch.uint8)[1].bitwise_xor_(1)
    writer = ArenaWriter(tuple(SPECS))
    staged = stage(writer, 1, seed=0)
    handle = handle_of(staged)
    copied = ask_model(served, tmp_path, arena=handle, digest=False)
    assert wrong_names(staged, copied.checksums) == []
    digested = ask_model(served, tmp_path, arena=handle, digest=True)
    assert wrong_names(staged, digested.checksums) == ["model.norm.weight"]


def test_alias_serves_the_slot_itself_and_frees_the_other_slot(tmp_path: Path) -> None:
    writer = ArenaWriter(tuple(SPECS))
    parameters = engine()
    served = model(parameters)
    # each slot is written again only when the engine has left it
    for version in range(1, 5):
        staged = stage(writer, version, seed=version)
        handle = handle_of(staged)
        reply = ask_model(served, tmp_path, arena=handle, alias=True, digest=True)
        assert reply.checksums == dict(staged.checksums)
        expected = values(version)
        for name, place in plan(parameters, SPECS).items():
            assert torch.equal(place, expected[name])
    embedding = parameters["model.embed_tokens.weight"]
    assert embedding.shape == (16, 4)
    assert not embedding[10:].any()
    slot = writer._slots[1]
    # by the trainer: nothing was copied
    slot["model.layers.1.mlp.experts.1.up_proj.weight"][2, 3] = 77.0
    assert parameters["model.layers.1.mlp.experts.w13_weight"][1, 5, 3] == 77.0


def test_engine_that_aliased_a_slot_copies_into_its_own_memory(tmp_path: Path) -> None:
    """Its mapping of the arena is private: nobody else sees what it writes."""
    writer = ArenaWriter(tuple(SPECS))
    served = model(engine())
    first = stage(writer, 1, seed=1)
    second = stage(writer, 2, seed=2)
    ask_model(served, tmp_path, arena=handle_of(first), alias=True)
    copied = ask_model(served, tmp_path, arena=handle_of(second))
    assert copied.checksums == dict(second.checksums)
    digested = ask_model(served, tmp_path, digest=True)
    assert digested.checksums == dict(second.checksums)
    expected = values(1)
    for name, tensor in writer._slots[0].items():
        assert torch.equal(tensor, expected[name])


def test_slot_served_by_an_engine_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_SLOT_FREE_WITHIN_S", 0.05)
    writer = ArenaWriter(tuple(SPECS))
    handle = handle_of(stage(writer, 1, seed=1))
    parameters = engine()
    served = model(parameters)
    ask_model(served, tmp_path, arena=handle, alias=True)
    with pytest.raises(WeightSyncError, match="an engine still reads slot 0"):
        stage(writer, 1, seed=2)  # again into the same slot
    stage(writer, 2, seed=2)
    with pytest.raises(WeightSyncError, match="an engine still reads slot 0"):
        stage(writer, 3, seed=3)  # the engine has not moved
    assert torch.equal(parameters["model.norm.weight"], values(1)["model.norm.weight"])


def test_slot_being_written_is_not_read(tmp_path: Path) -> None:
    writer = ArenaWriter(tuple(SPECS))
    handle = handle_of(stage(writer, 1, seed=1))
    for alias in (False, True):
        with (
            SlotLease(handle.path, handle.slot, writes=True),
            pytest.raises(WeightSyncError, match="the trainer writes slot 0"),
        ):
            ask(engine(), tmp_path, arena=handle, alias=alias)
    ask(engine(), tmp_path, arena=handle)


class Packed:
    use_intel_amx_backend = True


@pytest.mark.parametrize(
    "fault", ["derives from its weights", "for AMX", "in one piece", "has 128 rows"]
)
def test_engine_that_cannot_alias_is_refused_before_a_byte_moves(
    fault: str, tmp_path: Path
) -> None:
    parameters = engine()
    served = model(parameters)
    if fault == "derives from its weights":
        served.post_load_weights = lambda: None
    if fault == "for AMX":
        served.modules = lambda: [Packed()]
    if fault == "in one piece":
        parameters["model.norm.weight"] = torch.zeros(8)[::2]
    if fault == "has 128 rows":
        parameters["model.embed_tokens.weight"] = torch.zeros(128, 4)
    with pytest.raises(
        LayoutError,
        match=f"cannot alias the arena: .*{fault}.*--weights.arena-mode copy",
    ):
        ask_model(served, tmp_path, alias=True)
    ask_model(served, tmp_path)


def test_an_engine_that_fuses_in_another_order_cannot_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        engine_parameters.FUSED, "gate_up_proj", ("up_proj", "gate_proj")
    )
    monkeypatch.setattr(weight_loader, "slot_layout", lambda _: SlotLayout(OFFSETS, 0))
    with pytest.raises(LayoutError, match="at another place than a slot"):
        ask(engine(), tmp_path, alias=True)


def test_derived_engine_tensors_are_recomputed_from_new_weights(tmp_path: Path) -> None:
    """SGLang's own loader calls this hook of a model after it has loaded; so does
    ours."""
    parameters = engine()
    derived = []

    def post_load_weights() -> None:
        derived.append(parameters["model.norm.weight"].clone())

    served = model(parameters)
    served.post_load_weights = post_load_weights
    writer = ArenaWriter(tuple(SPECS))
    ask_model(served, tmp_path, arena=handle_of(stage(writer, 1, seed=0)))
    [recomputed] = derived
    assert torch.equal(recomputed, values()["model.norm.weight"])


def test_tensors_fused_by_sglang_in_one_call_are_in_one_bucket() -> None:
    """SGLang waits for both parts of a fused projection, and forgets the first with its
    call."""
    attention = "model.layers.0.self_attn"
    names = [
        f"{attention}.{name}.weight"
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    ]
    specs = tuple(TensorSpec(name=name, shape=(4,), dtype="float32") for name in names)
    assert bucket_names(specs, 16) == [names[:2], names[2:]]


@pytest.mark.parametrize("name", list(SHAPES))
def test_missing_tensor_is_refused_by_the_loader(name: str) -> None:
    with pytest.raises(LayoutError, match=name.replace(".", r"\.")):
        plan(engine(), [spec for spec in SPECS if spec.name != name])


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("fault", ["rows", "columns", "dtype", "twice", "unknown"])
def test_tensor_that_does_not_fit_the_engine_is_refused(name: str, fault: str) -> None:
    index = list(SHAPES).index(name)
    spec = SPECS[index]
    num_rows, *other_dimensions = spec.shape
    more_rows = num_rows + (100 if "embed" in name else 1)
    faults = {
        "rows": [replace(spec, shape=(more_rows, *other_dimensions))],
        "columns": [replace(spec, shape=(*spec.shape, 3))],
        "dtype": [replace(spec, dtype="bfloat16")],
        "twice": [spec, spec],
        "unknown": [spec, replace(spec, name=name + "_x")],
    }
    with pytest.raises(LayoutError):
        plan(engine(), [*SPECS[:index], *faults[fault], *SPECS[index + 1 :]])


def test_loader_reports_errors_without_raising(tmp_path: Path) -> None:
    served = model(engine())
    run(served, [])  # type: ignore[arg-type]
    run(served, [("not json", torch.empty(0))])  # type: ignore[arg-type]
    unknown = TensorSpec(name="nope", shape=(1,), dtype="float32")
    with pytest.raises(LayoutError, match="no such weight"):
        ask(engine(), tmp_path, tensors=(*SPECS, unknown))


def test_missing_loader_reply_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="left no reply"):
        read_reply(str(tmp_path / "reply"))
