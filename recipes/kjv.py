"""Train a small language model on the King James Bible with FSDP2.

    tpu-launch --nproc-per-node 2 -m tpu_dist.recipes.kjv
    torchrun --nproc-per-node 2 -m tpu_dist.recipes.kjv --backend gloo

See docs/recipes.md, or ``--help``.
"""

from __future__ import annotations

import logging
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from torch.distributed.elastic.multiprocessing.errors import record

from tpu_dist.errors import TpuDistError
from tpu_dist.recipes.checkpoint import CheckpointConfig
from tpu_dist.recipes.data import BatchConfig
from tpu_dist.recipes.kjv_config import KjvConfig
from tpu_dist.recipes.kjv_run import run
from tpu_dist.recipes.model import ModelConfig
from tpu_dist.recipes.sample import SampleConfig
from tpu_dist.recipes.schedule import OptimizerConfig
from tpu_dist.recipes.sharding import PrecisionConfig
from tpu_dist.recipes.tokenizer import TokenizerConfig
from tpu_dist.recipes.train import TrainConfig
from tpu_dist.recipes.world import World

_DEFAULT = KjvConfig()
_TRAIN, _MODEL, _SAMPLE = _DEFAULT.train, _DEFAULT.model, _DEFAULT.sample
_BATCH, _OPTIMIZER, _CHECKPOINT = _TRAIN.batch, _TRAIN.optimizer, _TRAIN.checkpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _option(panel: str, help_text: str, *names: str) -> object:
    return typer.Option(*names, help=help_text, rich_help_panel=panel)


@app.command()
def kjv(
    *,
    backend: Annotated[
        str, _option("Where", "Backend of the process group, such as tpu_dist or gloo.")
    ] = _DEFAULT.backend,
    device: Annotated[
        str, _option("Where", "Type of device that holds the tensors.")
    ] = _DEFAULT.device,
    timeout: Annotated[
        float, _option("Where", "Seconds that any wait for other processes may take.")
    ] = _DEFAULT.timeout.total_seconds(),
    run_dir: Annotated[
        Path | None,
        _option(
            "Run",
            "Directory of the run. Default: a new runs/kjv-NNNN; with --resume, the newest.",
        ),
    ] = _DEFAULT.run_dir,
    resume: Annotated[
        bool,
        _option(
            "Run",
            "Go on from the newest whole checkpoint of the run directory, or from the start "
            "if it has none.",
            "--resume",
        ),
    ] = _DEFAULT.resume,
    save_every: Annotated[
        int, _option("Run", "Steps between checkpoints; 0 saves only at the end.")
    ] = _CHECKPOINT.save_every,
    keep_last: Annotated[int, _option("Run", "Checkpoints to keep.")] = _CHECKPOINT.keep_last,
    log_every: Annotated[int, _option("Run", "Steps between progress lines.")] = _TRAIN.log_every,
    json_file: Annotated[
        Path | None,
        _option("Run", "Also write progress here, a JSON object a line.", "--json"),
    ] = _DEFAULT.json_file,
    seed: Annotated[
        int, _option("Training", "Seed of the weights, the order of the data, and the sample.")
    ] = _DEFAULT.seed,
    num_steps: Annotated[int, _option("Training", "Optimizer steps.")] = _TRAIN.num_steps,
    sequence_length: Annotated[
        int, _option("Training", "Tokens in a sequence.")
    ] = _BATCH.sequence_length,
    global_batch_size: Annotated[
        int, _option("Training", "Sequences in a step, over all processes.")
    ] = _BATCH.global_batch_size,
    accumulation_steps: Annotated[
        int, _option("Training", "Forward-backward passes in a step.")
    ] = _BATCH.accumulation_steps,
    learning_rate: Annotated[
        float, _option("Training", "The peak learning rate.")
    ] = _OPTIMIZER.learning_rate,
    final_learning_rate_ratio: Annotated[
        float, _option("Training", "What part of the peak the last step has.")
    ] = _OPTIMIZER.final_learning_rate_ratio,
    warmup_ratio: Annotated[
        float, _option("Training", "What part of the steps is warm-up.")
    ] = _OPTIMIZER.warmup_ratio,
    weight_decay: Annotated[
        float, _option("Training", "AdamW's weight decay, on matrices.")
    ] = _OPTIMIZER.weight_decay,
    max_gradient_norm: Annotated[
        float, _option("Training", "Gradients are scaled down to this norm.")
    ] = _OPTIMIZER.max_gradient_norm,
    compute_dtype: Annotated[
        str, _option("Training", "float32 or bfloat16: gathered parameters and activations.")
    ] = _DEFAULT.precision.compute_dtype,
    reduce_dtype: Annotated[
        str, _option("Training", "float32 or bfloat16: gradients as they are reduced.")
    ] = _DEFAULT.precision.reduce_dtype,
    held_out_every: Annotated[
        int, _option("Training", "One chapter in so many is held out for validation.")
    ] = _DEFAULT.held_out_every,
    vocabulary_size: Annotated[
        int, _option("Model", "Tokens of the byte-level BPE.")
    ] = _DEFAULT.tokenizer.vocabulary_size,
    dim: Annotated[int, _option("Model", "Width of the residual stream.")] = _MODEL.dim,
    num_layers: Annotated[int, _option("Model", "Blocks.")] = _MODEL.num_layers,
    num_heads: Annotated[int, _option("Model", "Attention heads.")] = _MODEL.num_heads,
    hidden_dim: Annotated[int, _option("Model", "Width inside the SwiGLU.")] = _MODEL.hidden_dim,
    tied_head: Annotated[
        bool,
        _option(
            "Model",
            "Whether the output head is the embedding.",
            "--tied-head/--untied-head",
        ),
    ] = _MODEL.tied_head,
    prompt: Annotated[
        str, _option("Sample", "What the sample at the end continues.")
    ] = _SAMPLE.prompt,
    sample_tokens: Annotated[
        int, _option("Sample", "Tokens of the sample; 0 for none.")
    ] = _SAMPLE.num_tokens,
    temperature: Annotated[
        float, _option("Sample", "0 takes the likeliest token, 1 draws from the distribution.")
    ] = _SAMPLE.temperature,
) -> None:
    """Train a small language model on the King James Bible with FSDP2."""

    def job() -> None:
        config = KjvConfig(
            backend=backend,
            device=device,
            timeout=timedelta(seconds=timeout),
            seed=seed,
            held_out_every=held_out_every,
            tokenizer=TokenizerConfig(vocabulary_size=vocabulary_size),
            model=ModelConfig(
                dim=dim,
                num_layers=num_layers,
                num_heads=num_heads,
                hidden_dim=hidden_dim,
                tied_head=tied_head,
            ),
            precision=PrecisionConfig(compute_dtype=compute_dtype, reduce_dtype=reduce_dtype),
            train=TrainConfig(
                num_steps=num_steps,
                log_every=log_every,
                batch=BatchConfig(
                    sequence_length=sequence_length,
                    global_batch_size=global_batch_size,
                    accumulation_steps=accumulation_steps,
                ),
                optimizer=OptimizerConfig(
                    learning_rate=learning_rate,
                    final_learning_rate_ratio=final_learning_rate_ratio,
                    warmup_ratio=warmup_ratio,
                    weight_decay=weight_decay,
                    max_gradient_norm=max_gradient_norm,
                ),
                checkpoint=CheckpointConfig(save_every=save_every, keep_last=keep_last),
            ),
            sample=SampleConfig(prompt=prompt, num_tokens=sample_tokens, temperature=temperature),
            run_dir=run_dir,
            resume=resume,
            json_file=json_file,
        )
        world = World.from_environment()
        _set_up_logging(world)
        run(config, world)

    try:
        # record writes the error, traceback and all, to the file that the launcher reads.
        record(job)()
    except (ValueError, TpuDistError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _set_up_logging(world: World) -> None:
    logging.basicConfig(
        level=logging.INFO if world.rank == 0 else logging.WARNING,
        format=f"%(asctime)s rank {world.rank} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def main() -> None:
    """Run the recipe from the command line, in one process of a launcher's."""
    # Ctrl-C ends the process where it stands, even inside a collective that a lost peer blocks,
    # where Python's own handler would wait. Checkpoints appear whole or not at all, so there is
    # nothing to tidy up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    app()


if __name__ == "__main__":
    main()
