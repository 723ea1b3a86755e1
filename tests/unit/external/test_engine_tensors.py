"""A trainer's weights under the names, in the shapes and dtypes that engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from muster.engine_tensors import engine_tensors, first_difference, model_slots
from muster.errors import ConfigError, InvalidInput

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bfloat16 whose output head is its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    return made


@pytest.fixture
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_float32_weights_become_the_folders_again_bit_for_bit(model: Any, folder: Path) -> None:
    found = engine_tensors(model, model_slots(folder))
    assert "lm_head.weight" not in found  # it is tied
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert not any(tensor.requires_grad for tensor in found.values())
    assert first_difference(found, folder) == ""


def test_a_changed_weight_is_named(model: Any, folder: Path) -> None:
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    assert first_difference(engine_tensors(model, model_slots(folder)), folder) == (
        "model.norm.weight"
    )


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_weights_sent_in_another_dtype_are_held_against_the_folders_in_that_dtype(
    model: Any, tmp_path: Path, kept: Any
) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()  # no value of bfloat16
    model.to(kept).save_pretrained(tmp_path)
    slots = model_slots(tmp_path)
    for dtype in ("bfloat16", "float32"):
        assert first_difference(engine_tensors(model, slots, dtype), tmp_path) == ""
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    assert first_difference(engine_tensors(model, slots, "bfloat16"), tmp_path)


def test_a_folder_may_be_given_as_text(folder: Path) -> None:
    found = engine_tensors(str(folder), model_slots(folder))
    assert first_difference(found, folder) == ""


def test_the_order_is_that_of_the_parameters(model: Any, folder: Path) -> None:
    """The reference trainer's too: equal weights have equal digests, whoever publishes them."""
    slots = model_slots(folder)
    names = [name for name, _ in model.named_parameters()]
    assert list(engine_tensors(model, slots)) == names
    assert list(engine_tensors(model.state_dict(), slots)) == names
    assert list(engine_tensors(lambda: model.state_dict(), slots)) == names


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel keeps its model."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module


def test_a_wrapped_model_has_the_names_of_the_one_within(model: Any, folder: Path) -> None:
    slots = model_slots(folder)
    plain = engine_tensors(model, slots)
    for wrapped in (Wrapper(model), {f"module.{n}": t for n, t in model.state_dict().items()}):
        found = engine_tensors(wrapped, slots)
        assert list(found) == list(plain)
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_layer_that_is_wrapped_alone_has_its_plain_name(model: Any, folder: Path) -> None:
    state = {
        n.replace("layers.0.", "layers.0._orig_mod."): t for n, t in model.state_dict().items()
    }
    assert set(engine_tensors(state, model_slots(folder))) == set(model_slots(folder))


def test_half_a_model_is_refused(model: Any, folder: Path) -> None:
    state = {n: t for n, t in model.state_dict().items() if "norm" not in n}
    with pytest.raises(InvalidInput, match="3 of 11 tensors that the engines load are missing"):
        engine_tensors(state, model_slots(folder))


def test_an_unknown_tensor_is_refused_and_a_tied_copy_is_not(model: Any, folder: Path) -> None:
    state = model.state_dict()
    assert "lm_head.weight" in state
    engine_tensors(state, model_slots(folder))
    with pytest.raises(InvalidInput, match="has no such tensor") as caught:
        engine_tensors({**state, "adapter.weight": torch.ones(2)}, model_slots(folder))
    assert caught.value.value == "adapter.weight"


def test_another_shape_is_refused(model: Any, folder: Path) -> None:
    state = {**model.state_dict(), "model.norm.weight": torch.ones(9)}
    with pytest.raises(InvalidInput, match="of shape \\(9,\\)"):
        engine_tensors(state, model_slots(folder))


def test_quantised_weights_are_refused(model: Any, folder: Path) -> None:
    state = {**model.state_dict(), "model.norm.weight": torch.ones(8, dtype=torch.int8)}
    with pytest.raises(InvalidInput, match="of dtype int8, and bfloat16 is needed"):
        engine_tensors(state, model_slots(folder))


def test_weights_that_are_not_loaded_are_refused(folder: Path) -> None:
    state = {n: torch.empty(s.shape, device="meta") for n, s in model_slots(folder).items()}
    with pytest.raises(InvalidInput, match="meta device"):
        engine_tensors(state, model_slots(folder))


def test_adapters_are_refused(model: Any) -> None:
    model.peft_config = {"default": object()}
    with pytest.raises(InvalidInput, match="adapters"):
        engine_tensors(model)


def test_a_dtype_of_ones_own_goes_before_the_folders(model: Any, folder: Path) -> None:
    found = engine_tensors(model, model_slots(folder), "float16")
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    with pytest.raises(InvalidInput, match="no dtype of torch"):
        engine_tensors(model, model_slots(folder), "half-precision")


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors"):
        model_slots(tmp_path)
