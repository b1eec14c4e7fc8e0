"""A tied output matrix is one tensor, and an untied one is two, in whatever layout a run trains and saves."""

import pytest
import torch

from megatron.core.tensor_parallel import RandomStream
from megatron.training.arguments import parse_arguments
from megatron.training.setup import attach_metrics
from megatron.training.training import build_hooks, train
from tests.distributed.training.saved_runs import (
    column,
    iterations,
    layout,
    manifest_of,
    metered_runs,
    read_checkpoint,
    resuming,
)
from tests.harness import run_ranks
from tests.hugging_face import hugging_face_model, to_hugging_face
from tests.training_harness import SHAPES, VOCAB, flags, start, write_corpus

EMBEDDING, OUTPUT = "model.embedding.word_embeddings.weight", "model.output_layer.weight"
TOKENS = torch.arange(64).reshape(2, 32) * 7 % VOCAB
# Where the first and the last part of the model lie: on one rank (the V), divided over replicas.
RESUMED = {
    "zb_v": [*layout(1, 2), "--pipeline-schedule=zb-v"],
    "zero3": ["--data-parallel-sharding-strategy=optim_grads_params"],
}


def go_on_alone(argv: list[str]) -> torch.Tensor:
    """Logits [b, s, v] of the model that was saved, on one rank; then the run goes on."""
    run = start(argv)
    with torch.no_grad():
        logits = run.chunks[0].model(tokens=TOKENS, stream=RandomStream(0)).transpose(0, 1)
    attach_metrics(run)
    train(run, build_hooks(run))
    return logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_run_goes_on_without_a_jump_and_its_weights_give_the_same_logits_elsewhere(tmp_path, tied):
    shape = [*SHAPES["llama"]] if not tied else [w for w in SHAPES["llama"] if not w.startswith("--untie")]
    base = flags(write_corpus(tmp_path / "corpus"), shape, "--train-iters=12", "--lr=3e-3")
    saved = tmp_path / "saved"

    def argv(name: str, *more: str) -> list[str]:
        return [*base, f"--metrics-file={tmp_path / name}.json", *more]

    straight = [*layout(2, 2), "--pipeline-schedule=zb-v"]
    both = [
        argv("straight", *straight, "--save", str(tmp_path / "straight")),
        argv("first", *straight, *resuming(saved), "--exit-interval=10"),
    ]
    run_ranks(4, metered_runs, both)
    resumed = [
        argv(name, *words, "--load", str(saved), "--save", str(tmp_path / name))
        for name, words in RESUMED.items()
    ]
    run_ranks(2, metered_runs, resumed)
    alone = argv("alone", "--load", str(saved), "--save", str(tmp_path / "alone"))
    (logits,) = run_ranks(1, go_on_alone, alone)

    expected = iterations(tmp_path / "straight.json")[10:]
    for name in (*RESUMED, "alone"):
        found = iterations(tmp_path / f"{name}.json")
        assert column(found, "iteration") == [11, 12]
        assert column(found, "lm_loss") == pytest.approx(column(expected, "lm_loss"), rel=2e-6), name
        assert column(found, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-5), name

    weights = {key: tensor for key, tensor in read_checkpoint(saved, 10).items() if key.startswith("model.")}
    assert (OUTPUT in weights) is not tied
    if not tied:
        assert not torch.allclose(weights[OUTPUT], weights[EMBEDDING], atol=1e-3)
    model = manifest_of(saved, 10)["state"]["config"]["model"]
    assert model["untie_embeddings_and_output_weights"] is not tied
    config = parse_arguments(base, "test").model
    reference = hugging_face_model(config, "llama")
    ours = {key.removeprefix("model."): tensor for key, tensor in weights.items()}
    unmatched = reference.load_state_dict(to_hugging_face(config, "llama", ours), strict=False)
    assert unmatched.missing_keys == (["lm_head.weight"] if tied else [])
    assert not unmatched.unexpected_keys
    reference.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(logits, reference(TOKENS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_checkpoint_says_whether_its_output_is_tied(tmp_path, tied):
    """The other kind of model is refused, not filled up with what happens to be there."""
    untie = ["--untie-embeddings-and-output-weights"]
    base = flags(write_corpus(tmp_path / "corpus"), [*SHAPES["gpt2"], "--train-iters=1"])
    saved = tmp_path / "saved"
    run_ranks(1, metered_runs, [[*base, *resuming(saved), *([] if tied else untie)]])
    with pytest.raises(Exception, match="untie-embeddings-and-output-weights"):
        run_ranks(1, metered_runs, [[*base, *resuming(saved), *(untie if tied else [])]])
