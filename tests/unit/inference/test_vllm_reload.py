"""Loading again with vLLM's own layers: a head that shares its weight with the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn at import
ROWS, COLUMNS = 128, 64


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Any]:
    """vLLM's layers ask for a configuration and for a group of one process."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()) as made:
        distributed.init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)
        yield made
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()


def tied() -> Any:
    """Loaded once, every weight 1, packed as vLLM does it after loading."""
    from vllm.model_executor.layers import vocab_parallel_embedding as layers
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = layers.VocabParallelEmbedding(ROWS, COLUMNS, params_dtype=torch.float32)
            head = layers.ParallelLMHead(ROWS, COLUMNS, params_dtype=torch.float32)
            self.lm_head = head.tie_weights(self.embed)

        def load_weights(self, tensors: Any) -> set[str]:
            mine, loaded = dict(self.named_parameters()), set()
            for name, tensor in tensors:
                loader = getattr(mine[name], "weight_loader", default_weight_loader)
                loader(mine[name], tensor)
                loaded.add(name)
            return loaded

    model = Tied()
    record_metadata_for_reloading(model)
    model.load_weights([("embed.weight", torch.ones(ROWS, COLUMNS))])
    for layer in (model.embed, model.lm_head):
        layer.quant_method.process_weights_after_loading(layer)
    return model


def logit(model: Any) -> float:
    """Of hidden states of 1: a column's sum."""
    head = model.lm_head
    return float(head.quant_method.apply(head, torch.ones(1, COLUMNS)).mean())


@pytest.mark.usefixtures("config")
def test_a_head_in_float32_has_a_new_copy_and_no_old_packed_weight() -> None:
    from services.inference.adapters import vllm_head
    from services.inference.adapters.vllm_reload import Reload

    model = tied()
    vars(model.lm_head)[vllm_head._COPY] = vllm_head._copy(model.lm_head)
    again = Reload(model, SimpleNamespace(dtype=torch.float32))
    again.begin()
    again.load({"embed.weight": torch.full((ROWS, COLUMNS), 2.0)})
    again.finish()
    assert vars(model.lm_head)[vllm_head._COPY].unique().tolist() == [2.0]
    assert not hasattr(model.lm_head, "cpu_linear")


@pytest.mark.usefixtures("config")
def test_a_head_that_shares_its_weight_has_the_new_one() -> None:
    from services.inference.adapters.vllm_reload import Reload

    model = tied()
    assert logit(model) == COLUMNS
    for value in (2.0, 3.0):
        again = Reload(model, SimpleNamespace(dtype=torch.float32))
        again.begin()
        assert again.under_way
        again.load({"embed.weight": torch.full((ROWS, COLUMNS), value)})
        again.finish()
        assert not again.under_way
        assert logit(model) == value * COLUMNS
        assert model.lm_head.weight is model.embed.weight
