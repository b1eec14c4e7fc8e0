"""Megatron Core's GPT on one CPU: losses and gradient norms of a few steps of plain SGD from given weights.

    python megatron_core_gpt.py FOLDER...

A program of its own, run with Megatron Core's folder alone on PYTHONPATH and outside this repository, since
both packages are called ``megatron``. Each FOLDER holds ``case.json`` (options of its TransformerConfig and
GPTModel, and the learning rate), ``weights.safetensors`` and ``batches.safetensors`` (tokens, labels and
loss_mask, [steps, b, s] each). For each folder a line of JSON comes back: the mean loss and the L2 norm of
the gradients of each step.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from safetensors.torch import load_file

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

# It asks for the current GPU here and there, also to keep random streams apart; nothing here is random.
torch.cuda.current_device = lambda: torch.device("cpu")
tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()

CPU_OPTIONS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "pipeline_dtype": torch.float32,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
ACTIVATIONS = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def build(case: dict, weights: dict[str, torch.Tensor]) -> GPTModel:
    """The model of a case with every weight taken from ``weights``, and none left over."""
    options = dict(case["config"])
    activation = ACTIVATIONS[options.pop("activation")]
    config = TransformerConfig(activation_func=activation, **options, **CPU_OPTIONS)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    model = GPTModel(config=config, transformer_layer_spec=spec, **case["model"])
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            assert parameter.shape == weights[name].shape, (name, parameter.shape, weights[name].shape)
            parameter.copy_(weights[name])
    return model


def run(case: dict, weights: dict[str, torch.Tensor], batches: dict[str, torch.Tensor]) -> dict:
    model = build(case, weights)
    losses, norms = [], []
    for tokens, labels, loss_mask in zip(
        batches["tokens"], batches["labels"], batches["loss_mask"], strict=True
    ):
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        hidden = torch.triu(torch.ones(1, 1, length, length), 1).bool()  # True: not to be looked at
        token_losses = model(
            input_ids=tokens, position_ids=positions, attention_mask=hidden, labels=labels
        )  # [b, s]
        loss = (token_losses * loss_mask).sum() / loss_mask.sum()
        model.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        losses.append(loss.item())
        norms.append(torch.stack([grad.double().square().sum() for grad in gradients]).sum().sqrt().item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= case["lr"] * parameter.grad
    return {"losses": losses, "norms": norms}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        store = dist.FileStore(f"{scratch}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        for folder in map(Path, sys.argv[1:]):
            case = json.loads((folder / "case.json").read_text())
            weights = load_file(folder / "weights.safetensors")
            batches = load_file(folder / "batches.safetensors")
            print(json.dumps(run(case, weights, batches)))
        dist.destroy_process_group()


main()
