"""The parts of Megatron-Bridge that Holdfast's integration meets, with the behaviour of its release 0.7: it needs Python 3.12
and Transformer Engine, which needs a GPU, and is not on the package index.

`install()` makes them importable. `Trainer` is its setup and training loop, with the same calls of the checkpoint manager and
the callbacks in the same order, over a real GPT of Megatron-Core with its distributed optimizer."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu  # type: ignore[import-not-found]
import torch
import torch.distributed as dist

megatron_on_cpu.enter()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    get_num_microbatches,
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

VOCABULARY, LENGTH = 64, 16
MICRO_BATCH, MICRO_BATCHES = 2, 2
SAMPLE_FLOPS = 1000
EVAL_EVERY = 10
allowed_prefixes = {"megatron.bridge."}


class DefaultCheckpointManager:
    """Bridge's manager: one file per save and rank, in place of a distributed checkpoint."""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        self.finalized = 0

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        return {}

    def save(self, ctx: Any, callback_manager: Any) -> None:
        place = Path(self.checkpoint_config.save) / f"iter_{ctx.state.train_state.step:07d}"
        place.mkdir(parents=True, exist_ok=True)
        model = [chunk.module.state_dict() for chunk in ctx.model]
        torch.save({"model": model, "train": asdict(ctx.state.train_state)}, place / f"rank-{dist.get_rank()}.pt")

    def load(self, ctx: Any) -> tuple[int, int]:
        newest = max(Path(self.checkpoint_config.load).glob("iter_*"))
        saved = torch.load(newest / f"rank-{dist.get_rank()}.pt", weights_only=False)
        for chunk, state in zip(ctx.model, saved["model"], strict=True):
            chunk.module.load_state_dict(state)
        vars(ctx.state.train_state).update(saved["train"])
        return ctx.state.train_state.step, ctx.state.train_state.floating_point_operations_so_far

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        self.finalized += 1


def register_allowed_target_prefix(prefix: str) -> None:
    allowed_prefixes.add(prefix)


def install() -> None:
    """Make `megatron.bridge` importable, as far as the integration imports it."""
    for name, members in (
        ("megatron.bridge", {}),
        ("megatron.bridge.training", {}),
        ("megatron.bridge.training.checkpointing", {"DefaultCheckpointManager": DefaultCheckpointManager}),
        ("megatron.bridge.utils", {}),
        (
            "megatron.bridge.utils.instantiate_utils",
            {"register_allowed_target_prefix": register_allowed_target_prefix},
        ),
    ):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        vars(module).update(members)
        parent, _, last = name.rpartition(".")
        setattr(importlib.import_module(parent), last, module)


@dataclass
class TrainState:
    step: int = 0
    consumed_train_samples: int = 0
    floating_point_operations_so_far: int = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            "step": torch.tensor(self.step),
            "consumed_train_samples": torch.tensor(self.consumed_train_samples),
            "floating_point_operations_so_far": torch.tensor(
                self.floating_point_operations_so_far, dtype=torch.float64
            ),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            setattr(self, name, int(value.item()))


def configuration(*, steps: int, out: Path | None = None, own: bool = False, overlap: bool = False, tp: int = 1) -> Any:
    """Bridge's `ConfigContainer`, as far as it is read here. `own`: Bridge writes checkpoints below `out`, and reads them."""
    files = str(out / "own") if own and out is not None else None
    return SimpleNamespace(
        checkpoint=SimpleNamespace(custom_manager_class=None, save=files, load=files, save_interval=4),
        peft=None,
        dist=SimpleNamespace(use_torch_fsdp2=False, use_megatron_fsdp=False),
        ddp=SimpleNamespace(overlap_param_gather=overlap, use_megatron_fsdp=False),
        optimizer=SimpleNamespace(use_distributed_optimizer=True),
        dataset=SimpleNamespace(dataloader_type="single"),
        logger=SimpleNamespace(log_interval=1),
        train=SimpleNamespace(train_iters=steps),
        inprocess_restart=None,
        tp=tp,
    )


@dataclass
class Trainer:
    """`pretrain(config, forward_step, callbacks=…)` of a small GPT. `before_step`: called when the gradients of an iteration
    are reduced, with the number of finished steps and the loss."""

    config: Any
    callbacks: list[Any] = field(default_factory=list)
    before_step: Callable[[int, float], None] = lambda step, loss: None
    evaluations: int = 0

    def setup(self) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=self.config.tp)
        replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        tensor_parallel.get_cuda_rng_tracker().reset()
        torch.manual_seed(7 + 100 * replica)
        tensor_parallel.model_parallel_cuda_manual_seed(7 + 100 * replica)
        unset_num_microbatches_calculator()
        init_num_microbatches_calculator(0, None, MICRO_BATCH * MICRO_BATCHES * replicas, MICRO_BATCH, replicas)
        self.state = SimpleNamespace(cfg=self.config, train_state=TrainState())
        self.manager = self._manager()
        self.model, self.optimizer, self.scheduler = self._parts()
        if self._should_load():
            self.manager.load(
                SimpleNamespace(
                    state=self.state,
                    model=self.model,
                    optimizer=self.optimizer,
                    opt_param_scheduler=self.scheduler,
                    strict=True,
                )
            )
        torch.rand(3)  # what the iterators of data loaders draw

    def _manager(self) -> Any:
        name = self.config.checkpoint.custom_manager_class
        if name is None:
            return DefaultCheckpointManager(self.config.checkpoint)
        assert any(name.startswith(prefix) for prefix in allowed_prefixes), name
        module, _, member = name.rpartition(".")
        return getattr(importlib.import_module(module), member)(self.config.checkpoint)

    def _should_load(self) -> bool:
        context = getattr(self.manager, "checkpointing_context", {})
        local = context.get("local_checkpoint_manager")
        load = self.config.checkpoint.load
        return (local is not None and local.find_latest() != -1) or (
            load is not None and any(Path(load).glob("iter_*"))
        )

    def _parts(self) -> tuple[list[Any], Any, Any]:
        shape = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.1,
            hidden_dropout=0.1, gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
            tensor_model_parallel_size=self.config.tp,
        )  # fmt: skip
        gpt = GPTModel(shape, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
        overlap = self.config.ddp.overlap_param_gather
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
        )
        model = [DistributedDataParallel(shape, ddp, gpt)]
        model[0].broadcast_params()
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                min_lr=1e-3,
                use_distributed_optimizer=True,
                clip_grad=1.0,
                overlap_param_gather=overlap,
            ),
            model,
        )
        scheduler = OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=5, lr_decay_steps=100, lr_decay_style="cosine",
            start_wd=0.01, end_wd=0.01, wd_incr_steps=100, wd_incr_style="constant",
        )  # fmt: skip
        return model, optimizer, scheduler

    def train(self) -> None:
        """`train()`: the manager is called at the top of each iteration, the step counted after the callback."""
        train = self.state.train_state
        self._fire("on_train_start")
        while train.step < self.config.train.train_iters:
            self.manager.finalize_async_saves(state=self.state, blocking=False)
            update_num_microbatches(train.consumed_train_samples, consistency_check=False)
            self._fire("on_train_step_start")
            loss, norm = self._step()
            self._fire("on_train_step_end", loss_dict={"lm loss": loss}, grad_norm=norm, skipped_iter=False)
            train.step += 1
            batch = parallel_state.get_data_parallel_world_size() * MICRO_BATCH * get_num_microbatches()
            train.consumed_train_samples += batch
            train.floating_point_operations_so_far += batch * SAMPLE_FLOPS
            if train.step % EVAL_EVERY == 0:
                self._evaluate()
            if self.config.checkpoint.save and train.step % self.config.checkpoint.save_interval == 0:
                self.manager.save(SimpleNamespace(state=self.state, model=self.model, optimizer=self.optimizer), None)
        self.manager.finalize_async_saves(state=self.state, blocking=True, terminate=True)
        self._fire("on_train_end")

    def _step(self) -> tuple[torch.Tensor, float]:
        (chunk,) = self.model
        chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        count = get_num_microbatches()
        total = torch.zeros(())
        for micro in range(count):
            last = micro == count - 1
            if not last:
                with chunk.no_sync():
                    loss = self._forward(micro) / count
                    loss.backward()
            else:
                loss = self._forward(micro) / count
                loss.backward()
            total += loss.detach()
        chunk.finish_grad_sync()
        self.before_step(self.state.train_state.step, total.item())
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return total, float(norm)

    def _forward(self, micro: int) -> Any:
        seed = 1000 * (self.state.train_state.consumed_train_samples + micro) + parallel_state.get_data_parallel_rank()
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(LENGTH).expand(MICRO_BATCH, LENGTH)
        mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
        return self.model[0](tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()

    def _evaluate(self) -> None:
        self._fire("on_eval_start")
        torch.rand(5)
        self.evaluations += 1
        self._fire("on_eval_end")

    def _fire(self, event: str, **values: Any) -> None:
        context = SimpleNamespace(
            state=self.state, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **values
        )
        for callback in self.callbacks:
            if (method := getattr(callback, event, None)) is not None:
                method(context)
