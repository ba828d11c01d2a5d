import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_dist.recipes.model import DecoderLM, ModelConfig, num_parameters, rotate, rotation_table
from tpu_dist.recipes.sample import SampleConfig, continue_tokens
from tpu_dist.recipes.schedule import OptimizerConfig, make_optimizer

VOCABULARY, LENGTH = 50, 12
CONFIG = ModelConfig(dim=16, num_layers=2, num_heads=2, hidden_dim=24)


def make(config: ModelConfig = CONFIG, *, device: str = "cpu", seed: int = 0) -> DecoderLM:
    with torch.device(device):
        model = DecoderLM(config, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
    model.to_empty(device="cpu")
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


MODEL = make()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, LENGTH - 1))
def test_later_tokens_do_not_change_earlier_logits(seed: int, position: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    changed = tokens.clone()
    changed[:, position:] = (tokens[:, position:] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = MODEL(tokens), MODEL(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.equal(before[:, position:], after[:, position:])


def test_every_earlier_token_is_seen() -> None:
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    embedded = MODEL.embedding(tokens).detach().requires_grad_()
    hidden = embedded
    for block in MODEL.decoder_blocks():
        hidden = block(hidden, MODEL.rotations)
    (gradient,) = torch.autograd.grad(hidden[0, -1].sum(), embedded)
    assert bool((gradient[0].abs().sum(dim=-1) > 0).all())


def test_fewer_tokens_than_the_length_are_welcome_and_more_are_refused() -> None:
    assert MODEL(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, VOCABULARY)
    with pytest.raises(ValueError, match="12 positions, got 13"):
        MODEL(torch.zeros(1, LENGTH + 1, dtype=torch.int64))


def test_made_on_meta_or_not_the_first_values_are_the_same_and_all_finite() -> None:
    one, two = make(), make(device="meta")
    for (name, left), (_, right) in zip(
        [*one.named_parameters(), *one.named_buffers()],
        [*two.named_parameters(), *two.named_buffers()],
        strict=True,
    ):
        assert torch.equal(left, right), name
        assert bool(left.isfinite().all()), name
    assert not torch.equal(one.embedding.weight, make(seed=1).embedding.weight)


def test_a_new_model_is_close_to_a_uniform_guess() -> None:
    logits = MODEL(torch.randint(VOCABULARY, (4, LENGTH)))
    assert logits.log_softmax(-1).neg().mean().item() == pytest.approx(
        torch.tensor(float(VOCABULARY)).log().item(), abs=0.2
    )


def test_an_untied_head_has_weights_of_its_own() -> None:
    untied = make(ModelConfig(dim=16, num_layers=2, num_heads=2, hidden_dim=24, tied_head=False))
    assert num_parameters(untied) == num_parameters(MODEL) + VOCABULARY * CONFIG.dim
    assert untied(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, VOCABULARY)


def test_attention_scores_depend_on_distance_alone() -> None:
    table = rotation_table(40, 8, base=10_000.0)
    query, key = torch.randn(2, 1, 1, 1, 8).unbind(0)

    def score(at: int, of: int) -> float:
        turned = rotate(query, table[:, at : at + 1]) * rotate(key, table[:, of : of + 1])
        return float(turned.sum())

    assert score(7, 3) == pytest.approx(score(31, 27), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-4)


def test_a_few_steps_learn_a_sequence_by_heart() -> None:
    model = make()
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2))
    tokens = torch.arange(LENGTH + 1).repeat(2, 1)
    losses = []
    for _ in range(30):
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 < 3 < losses[0]
    greedy = SampleConfig(num_tokens=LENGTH - 2, temperature=0.0)
    continued = continue_tokens(
        model, [0, 1], greedy, stop_at=-1, seed=0, device=torch.device("cpu")
    )
    assert continued == list(range(2, LENGTH))


def test_a_sample_stops_at_its_token_repeats_with_its_seed_and_outgrows_the_window() -> None:
    long = SampleConfig(num_tokens=3 * LENGTH, temperature=1.0)

    def draw(*, stop_at: int = -1, seed: int = 0) -> list[int]:
        return continue_tokens(
            MODEL, [3], long, stop_at=stop_at, seed=seed, device=torch.device("cpu")
        )

    drawn = draw()
    assert len(drawn) == 3 * LENGTH
    assert draw() == drawn != draw(seed=1)
    assert draw(stop_at=drawn[5]) == drawn[: drawn.index(drawn[5])]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0}, "dim must be at least 1"),
        ({"dim": 10, "num_heads": 4}, "even multiple of num_heads"),
        ({"dim": 12, "num_heads": 4}, "even multiple of num_heads"),
        ({"num_layers": -1}, "num_layers must be at least 1"),
        ({"rope_base": 1.0}, "rope_base must be above 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)
