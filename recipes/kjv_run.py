"""One process of a run of the King James recipe, from the corpus to the sample."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

from tpu_dist.recipes import run_directory, text
from tpu_dist.recipes.checkpoint import Checkpoints, TrainingState
from tpu_dist.recipes.data import TrainingBatches, Windows
from tpu_dist.recipes.evaluate import evaluate
from tpu_dist.recipes.kjv_config import KjvConfig
from tpu_dist.recipes.model import DecoderLM, num_parameters
from tpu_dist.recipes.progress import Progress, open_json
from tpu_dist.recipes.run_directory import RunDirectory
from tpu_dist.recipes.sample import continue_tokens
from tpu_dist.recipes.schedule import make_optimizer
from tpu_dist.recipes.sharding import shard
from tpu_dist.recipes.tokenizer import Tokenizer, require_tokenizers, shared_tokenizer
from tpu_dist.recipes.train import train
from tpu_dist.recipes.world import World, process_group

_RUNS = Path("runs")
_NAME = "kjv"


def run(config: KjvConfig, world: World) -> None:
    """Train, evaluate and sample. Collective: every process of the world calls it alike.

    Raises:
        ValueError: The options do not fit each other or the number of processes.
        RecipeError: It cannot go on; see errors.py.
    """
    # What can be refused is refused before anything slow, and before peers wait for it.
    config.train.batch.windows_a_pass(world.size)
    require_tokenizers()
    corpus = text.split(text.load_chapters(), held_out_every=config.held_out_every)
    claimed = _claim(config) if world.rank == 0 else None
    device = torch.device(config.device)

    with (
        open_json(config.json_file if world.rank == 0 else None, append=config.resume) as json_file,
        process_group(config.backend, config.timeout),
    ):
        progress = Progress(Console(file=sys.stdout), json_file=json_file, rank=world.rank)
        directory = _agree(claimed, config, device)
        checkpoints = Checkpoints(
            directory.checkpoints,
            rank=world.rank,
            keep_last=config.train.checkpoint.keep_last,
        )
        tokenizer = shared_tokenizer(
            directory.path,
            corpus.training,
            config.tokenizer,
            rank=world.rank,
            timeout=config.timeout,
        )
        length = config.train.batch.sequence_length
        training = Windows(tokenizer.encode_documents(corpus.training), length)
        validation = Windows(tokenizer.encode_documents(corpus.validation), length)
        model = _build(config, tokenizer, device)
        state = TrainingState(model=model, optimizer=make_optimizer(model, config.train.optimizer))
        progress.note(
            f"{num_parameters(model) / 1e6:.2f} M parameters, {training.num_targets:,} tokens of "
            f"text, {world.size} processes, backend {config.backend}, device {config.device}; "
            f"run directory {directory.path}"
        )
        if directory.resume_step is not None:
            checkpoints.load(state, step=directory.resume_step)
            progress.note(f"resumed after step {state.step}")
        batches = TrainingBatches(
            training,
            config.train.batch,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
            position=state.position,
        )
        train(
            config.train,
            state,
            batches,
            checkpoints=checkpoints,
            progress=progress,
            device=device,
        )
        _conclude(config, model, validation, tokenizer, progress, device, state.step)


def _claim(config: KjvConfig) -> RunDirectory:
    """Rank 0's: decide on the directory and the checkpoint, and clear up after a killed run."""
    path = config.run_dir
    if path is None:
        choose = run_directory.newest_path if config.resume else run_directory.fresh_path
        path = choose(_RUNS, _NAME)
    directory = run_directory.claim(path, config.settings(), resume=config.resume)
    Checkpoints(
        directory.checkpoints, rank=0, keep_last=config.train.checkpoint.keep_last
    ).remove_unfinished()
    return directory


def _agree(claimed: RunDirectory | None, config: KjvConfig, device: torch.device) -> RunDirectory:
    """Rank 0's directory, on every process. Collective.

    Only numbers travel. What the processes see of a shared file system may differ for a while, so
    none but rank 0 looks for checkpoints.
    """
    numbers = torch.zeros(2, dtype=torch.int64)
    if claimed is not None:
        numbers[0] = 0 if config.run_dir else run_directory.number_of(claimed.path)
        numbers[1] = -1 if claimed.resume_step is None else claimed.resume_step
    numbers = numbers.to(device)
    dist.broadcast(numbers, src=0)
    number, step = (int(n) for n in numbers.tolist())
    directory = RunDirectory(
        path=config.run_dir or run_directory.numbered_path(_RUNS, _NAME, number),
        resume_step=None if step < 0 else step,
    )
    run_directory.require_writable(directory.checkpoints)
    return directory


def _build(config: KjvConfig, tokenizer: Tokenizer, device: torch.device) -> DecoderLM:
    """A sharded model with its first weights; no process ever holds all of them at once."""
    with torch.device("meta"):
        model = DecoderLM(
            config.model,
            vocabulary_size=tokenizer.vocabulary_size,
            sequence_length=config.train.batch.sequence_length,
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    shard(model, mesh, config.precision)
    model.to_empty(device=device)
    model.reset_parameters(torch.Generator().manual_seed(config.seed))
    return model


def _conclude(
    config: KjvConfig,
    model: DecoderLM,
    validation: Windows,
    tokenizer: Tokenizer,
    progress: Progress,
    device: torch.device,
    step: int,
) -> None:
    """Evaluate, and show what the model writes."""
    model.eval()
    batch = config.train.batch
    result = evaluate(
        model,
        validation,
        batch_size=batch.windows_a_pass(dist.get_world_size()),
        device=device,
    )
    progress.validation(
        step=step,
        loss=result.loss,
        perplexity=result.perplexity,
        num_tokens=result.num_tokens,
    )
    if config.sample.num_tokens:
        continuation = continue_tokens(
            model,
            tokenizer.encode(config.sample.prompt),
            config.sample,
            stop_at=tokenizer.end_of_text,
            seed=config.seed,
            device=device,
        )
        progress.sample(config.sample.prompt, tokenizer.decode(continuation))
