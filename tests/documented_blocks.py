"""What the blocks of code in the documentation need in order to run, and those that cannot run in a test, each with the reason.

A Python block runs if it is a policy, if it needs no names from elsewhere, or with the names in `STAND_INS`. Every other one is
in `NOT_RUN`; its names, arguments and types are checked all the same. A YAML block is a job file, or a part of one; others are
in `NOT_A_JOB`.
"""

from __future__ import annotations

from types import MappingProxyType

_FRAMEWORK = "needs a training framework that is not installed here: tests/frameworks trains with it"
_TRAINED = """
import torch
import torch.distributed.checkpoint as dcp
import holdfast.train as hf

run = hf.attach()
model = torch.nn.Linear(2, 2)
optim = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.StepLR(optim, 1)
total_steps = total = 3

def train_step(*_):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optim.step()
    return loss.item()
"""
_SAVED = _TRAINED + "state = {'model': model, 'optim': optim}\n"

STAND_INS = MappingProxyType(
    {
        "README.md: import holdfast.train as hf": _TRAINED.replace("run = hf.attach()", "")
        + "n_tokens = 8\nbuild = lambda mesh: (model, optim, Data())\n"
        "class Data:\n    __next__ = lambda self: None\n"
        "    state_dict = lambda self: {}\n    load_state_dict = lambda *_: None\n",
        'docs/checkpoints.md: state = {"model": model, "optim": optim, "sched": sched, "data": data}': _TRAINED
        + "data = hf.ElasticSampler(8, global_batch=2, world=run.world)\n",
        "docs/checkpoints.md: import torch.distributed.checkpoint as dcp": _TRAINED
        + "dcp.save({'model': model.state_dict(), 'optim': optim.state_dict()}, checkpoint_id='dcp/')\n",
        "docs/checkpoints.md: loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, "
        "generator=torch.Generator().manual_seed(seed + epoch))": (
            "import torch\nfrom torch.utils.data import DataLoader, SequentialSampler\n"
            "dataset, seed, epoch = list(range(16)), 0, 0\nsampler = SequentialSampler(dataset)\n"
        ),
        'docs/existing-checkpoints.md: state = {"model": model, "optim": optim}': _TRAINED
        + "torch.save(model.state_dict(), 'pretrained.pt')\n",
        "docs/elasticity.md: @run.on_resize": _TRAINED,
        "docs/elasticity.md: per_replica = 32": _TRAINED + "n_samples = 512\n",
        "docs/elasticity.md: @run.on_leaving": _TRAINED + "import sys\nwriter = sys.stdout\n",
        "docs/frameworks.md: import torch.distributed.checkpoint as dcp": "import os\n"
        "os.environ['HOLDFAST_CHECKPOINT_DIR'] = 'checkpoints'\n"
        + _SAVED.replace("run = hf.attach()", "")
        + "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
        + "state = {'model': model.state_dict()}\n",
        "docs/frameworks.md: import holdfast.train as hf": _SAVED,
    }
)
NOT_RUN = MappingProxyType(
    {
        "README.md: from holdfast.integrations.transformers import attach": _FRAMEWORK,
        "README.md: from holdfast.integrations.accelerate import attach": _FRAMEWORK,
        "docs/frameworks.md: from transformers import Trainer": _FRAMEWORK,
        "docs/frameworks.md: from holdfast.integrations.lightning import HoldfastCallback": _FRAMEWORK,
        "docs/frameworks.md: from holdfast.integrations.fabric import attach": _FRAMEWORK,
        "docs/frameworks.md: from holdfast.integrations.accelerate import attach": _FRAMEWORK,
        "docs/frameworks.md: from holdfast.integrations.deepspeed import attach": _FRAMEWORK,
        "docs/frameworks.md: from holdfast.integrations.megatron_bridge import attach": _FRAMEWORK,
        "docs/checkpoints.md: from holdfast.integrations.dcp import Reader, Stager, Writer": (
            "needs files that DCP has written before: tests/frameworks/test_examples.py starts from such files"
        ),
        "docs/loggers.md: import holdfast.train as hf": (
            "writes to Weights & Biases and MLflow: tests/integration/train/test_loggers.py does, offline"
        ),
        "docs/scripts.md: # mypkg/data.py": "two files in one block: tests/unit/train/test_preparation.py has such a module",
    }
)
NOT_A_JOB = MappingProxyType({"docs/telemetry.md: scrape_configs:": "a part of Prometheus' configuration"})
