"""A trainer's weights as the engines of its run load them.

Owns: names, the choice of tensors, their dtype. Promise: what comes out has exactly the tensors of
the model folder that the run began with, in the order in which they were given, each in the dtype
that it has there; a weight that is tied to another appears as often as it does in the folder; what
is missing, unknown, of another shape or of no number type is refused by name. torch is imported
only where tensors are touched.
Does not cover: sending them (transfer/), gathering what is sharded over processes but DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.errors import ConfigError, InvalidInput
from muster.types import Value

Source = Any
"""A torch module, a mapping of names to tensors, a function that gives one, or a model folder."""

_FUSED = ("experts.gate_up_proj", "experts.down_proj")
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class Slot(Value, frozen=True):
    """A tensor of the model folder; `dtype` is torch's word."""

    shape: tuple[int, ...]
    dtype: str


def model_slots(folder: Path) -> dict[str, Slot]:
    """Name → slot of every tensor in a model folder, from the headers of its files."""
    from safetensors import safe_open

    found: dict[str, Slot] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # not a mapping
                piece = file.get_slice(name)
                found[name] = Slot(tuple(piece.get_shape()), _DTYPES[piece.get_dtype()])
    if not found:
        raise ConfigError(
            "there are no safetensors weights in this model folder",
            field="model.path",
            value=folder,
            way_out="name the Hugging Face folder that the engines of the run load",
        )
    return found


def engine_tensors(
    source: Source, slots: Mapping[str, Slot] | None = None, dtype: str = ""
) -> dict[str, Any]:
    """Name → detached tensor of everything that an engine loads; views of the live weights where
    nothing has to be changed.

    slots: those of the run's model folder; None takes what is given, unchecked (the engines check
    names and shapes). dtype: torch's word, for every floating-point tensor; "": that of the slot.
    Raises InvalidInput naming the tensor.
    """
    given = _given(source)
    if slots is not None:
        given = _chosen(given, slots)
    return {n: _cast(n, t, dtype or (slots[n].dtype if slots else "")) for n, t in given.items()}


def first_difference(tensors: Mapping[str, Any], folder: Path) -> str:
    """Name of the first tensor that is not, bit for bit, the folder's in the dtype in which it is
    sent; "" when all are."""
    import torch
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # not a mapping
                if (sent := tensors.get(name)) is None:
                    return str(name)
                if not torch.equal(sent, file.get_tensor(name).to(sent.dtype)):
                    return str(name)
    return ""


def by_checkpoint_name(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Parameters under the names that a model folder has for them, and engines know.

    They differ where transformers holds the experts of a layer as one tensor; these come as views
    or copies of single experts.
    """
    if not any(name.endswith(_FUSED) for name in tensors):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    apart = revert_weight_conversion(model, tensors)
    return {name: apart[name].contiguous() for name in sorted(apart)}


def _given(source: Source) -> dict[str, Any]:
    """What the source holds, whole and by bare names: parameters first, in their order."""
    if isinstance(source, str | Path):
        source = _read(Path(source))
    if callable(source) and not hasattr(source, "state_dict"):
        source = source()
    if not hasattr(source, "state_dict"):
        return {_bare(name): _whole(tensor) for name, tensor in dict(source).items()}
    model = _unwrapped(source)
    if getattr(model, "peft_config", None):
        raise InvalidInput(
            "engines load whole weights, and this model holds adapters beside them",
            field="model",
            value=type(model).__name__,
            way_out="publish a function that merges them and gives the merged state dict",
        )
    named = {_bare(name): parameter for name, parameter in model.named_parameters()}
    named = by_checkpoint_name(model, {name: _whole(tensor) for name, tensor in named.items()})
    rest = {_bare(name): tensor for name, tensor in model.state_dict().items()}
    fused = any(name.endswith(_FUSED) for name in rest)
    return named if fused else named | {n: _whole(t) for n, t in rest.items() if n not in named}


def _read(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(str(path)).items()}


def _unwrapped(model: Any) -> Any:
    """The model within torch.compile, DDP and the like."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None or not hasattr(inner, "state_dict"):
            return model
        model = inner


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper) or f".{wrapper}" in name:
            name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def _whole(tensor: Any) -> Any:
    """A sharded tensor gathered: every process has to ask then, as torch wants it."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def _chosen(given: dict[str, Any], slots: Mapping[str, Slot]) -> dict[str, Any]:
    """Exactly the tensors of the model folder."""
    missing = [name for name in slots if name not in given]
    if missing:
        raise _bad(
            f"{len(missing)} of {len(slots)} tensors that the engines load are missing",
            missing[0],
            "publish every tensor of the model, by its name in the model folder",
        )
    known = {_place(given[name]) for name in slots}
    for name, tensor in given.items():
        if name not in slots and _place(tensor) not in known and tensor.is_floating_point():
            problem = "the model that the engines load has no such tensor"
            raise _bad(problem, name, "start the run with this model (model.path)")
    for name, slot in slots.items():
        if tuple(given[name].shape) != slot.shape:
            problem = f"of shape {tuple(given[name].shape)}, and the engines have {slot.shape}"
            raise _bad(problem, name, "start the run with this model (model.path)")
    return {name: tensor for name, tensor in given.items() if name in slots}


def _place(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """The same for tied weights."""
    return tensor.data_ptr(), tuple(tensor.shape)


def _cast(name: str, tensor: Any, dtype: str) -> Any:
    import torch

    if tensor.is_meta:
        raise _bad("it holds no numbers (it is on the meta device)", name, "load the model first")
    if not dtype or str(tensor.dtype) == f"torch.{dtype}":
        return tensor
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise InvalidInput(
            "no dtype of torch", field="dtype", value=dtype, way_out='write "bfloat16", say'
        )
    if tensor.is_floating_point() != wanted.is_floating_point:
        problem = f"of dtype {str(tensor.dtype).removeprefix('torch.')}, and {dtype} is needed"
        raise _bad(problem, name, "publish the weights themselves: nothing quantised or packed")
    return tensor.to(wanted)


def _bad(problem: str, name: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field="tensor", value=name, way_out=way_out)
