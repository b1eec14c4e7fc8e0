import itertools

import pytest
import torch

from megatron.inference.generate import SamplingOptions, generate


def _successor(tokens):
    """After token t, token t + 1 (mod 10) has most of the probability, and t + 2 the rest."""
    logits = torch.full((1, 10), -20.0)
    logits[0, (tokens[0, -1] + 1) % 10] = 2.0
    logits[0, (tokens[0, -1] + 2) % 10] = 1.0
    return logits


def test_greedy_follows_the_most_likely_token():
    options = SamplingOptions(max_new_tokens=4, temperature=0)
    assert generate(_successor, [7], options, context_length=8) == [8, 9, 0, 1]


def test_the_end_of_document_ends_the_text_and_is_left_out():
    options = SamplingOptions(max_new_tokens=9, temperature=0)
    assert generate(_successor, [7], options, context_length=8, eod=0) == [8, 9]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.5}])
def test_narrowed_to_the_best_token_sampling_is_greedy(options):
    options = SamplingOptions(max_new_tokens=4, **options)
    assert generate(_successor, [7], options, context_length=8) == [8, 9, 0, 1]


def test_sampling_draws_with_the_model_s_probabilities():
    # exp(2) against exp(1): the successor comes with probability 1 / (1 + e^-1) = 0.731.
    options = SamplingOptions(max_new_tokens=2000)
    tokens = [0, *generate(_successor, [0], options, context_length=1)]
    steps = [(after - before) % 10 for before, after in itertools.pairwise(tokens)]
    assert set(steps) == {1, 2}
    assert steps.count(1) / len(steps) == pytest.approx(0.731, abs=0.03)


def test_the_model_sees_no_more_than_its_context():
    lengths = []

    def model(tokens):
        lengths.append(tokens.shape[1])
        return _successor(tokens)

    generate(model, [1, 2, 3], SamplingOptions(max_new_tokens=4, temperature=0), context_length=4)
    assert lengths == [3, 4, 4, 4]


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"max_new_tokens": 0}, {"seed": 2**63}]
)
def test_senseless_options_are_refused_by_flag(options):
    flag = "--" + next(iter(options)).replace("_", "-")
    with pytest.raises(ValueError, match=flag):
        SamplingOptions(**options)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt"):
        generate(_successor, [], SamplingOptions(), context_length=4)
