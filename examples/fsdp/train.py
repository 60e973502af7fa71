"""Train a byte-level transformer with FSDP2 on the Python standard library's own source.

    python train.py --steps 20                              one process
    torchrun --nproc-per-node 2 train.py                    model and optimizer in two shards
    HOLDFAST_CHECKPOINT_DIR=… torchrun …                    with checkpoints; can continue on one rank or three
    holdfast run job.yaml                                   two shards, with recovery; can continue with one

Parameters and moments are sharded over all ranks. A checkpoint consists of the shards of all ranks; after a resize,
the state is assembled from them. The global batch and the samples of each step are the same at every size.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import holdfast.train as hf


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in total (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="model width (default %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="bytes per sample (default %(default)s)")
    parser.add_argument("--global-batch", type=int, default=24, help="samples per step; a multiple of the ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per process")
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--out", type=Path, help="directory for loss.jsonl, one line per step")
    return parser.parse_args()


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(-2))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, seq: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def load_text(files: int = 16) -> Tensor:
    """The largest top-level modules of the standard library as one uint8 tensor (about 2 MB)."""
    modules = Path(sysconfig.get_path("stdlib")).glob("*.py")
    largest = sorted(modules, key=lambda module: (-module.stat().st_size, module.name))[:files]
    return torch.frombuffer(bytearray().join(module.read_bytes() for module in largest), dtype=torch.uint8)


def append_loss(directory: Path, step: int, loss: float) -> None:
    """Appends one line per step. For a repeated step, the last line counts."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "loss.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def main(run: hf.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # equal weights on every rank; sharding then keeps this rank's part
    model = Transformer(args.layers, args.width, args.heads, args.seq).to(run.device)
    mesh = run.mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = load_text()
    window = torch.arange(args.seq + 1)
    data = hf.ElasticSampler(
        (len(text) - 1) // args.seq, global_batch=args.global_batch, world=run.world, seed=args.seed
    )

    state: dict[str, Any] = {"model": model, "optim": optimizer, "data": data}
    step = run.restore(state)
    while step < args.steps:
        with run.step(step) as s:
            with run.data_wait():
                (indices,) = next(data)  # one micro-batch: the global batch divided by the number of ranks
                sample = text[indices[:, None] * args.seq + window].long().to(run.device)
            loss = model(sample[:, :-1], sample[:, 1:])
            optimizer.zero_grad()
            loss.backward()  # FSDP averages the gradients over the ranks
            optimizer.step()
            mean = loss.detach() / run.world_size
            dist.all_reduce(mean)
            s.log(loss=mean, tokens=sample[:, 1:].numel())
        step += 1
        if run.rank == 0:
            if args.out is not None:
                append_loss(args.out, step, mean.item())
            if step % args.log_every == 0:
                print(f"step {step:6d}  loss {mean.item():.4f}", flush=True)
        run.checkpoint(state, step)


if __name__ == "__main__":
    arguments = parse_arguments()
    hf.launch(lambda run: main(run, arguments))
