"""World size, throughput, classes of goodput and incidents in the user's own experiment logger: TensorBoard, Weights & Biases,
MLflow.

    from holdfast.integrations import loggers

    wandb_run = loggers.wandb_run(run, project="gpt")           # of rank 0; None on the others
    loggers.attach(run, loggers.Wandb(wandb_run), loggers.TensorBoard("runs/gpt"))

Rank 0 logs; on other ranks `attach` does nothing. What is logged has one of two sources, which are never mixed:

* this process: number of ranks, generation, and what rank 0 has measured of its own steps (`holdfast/rank0/…`);
* the supervisor: tokens per second of the job, classes of goodput, incidents (`holdfast/job/…`). Rank 0 reads them from the API
  if the script's environment has `HOLDFAST_API` and, unless the API is open, `HOLDFAST_API_TOKEN`; otherwise they are left
  out.

A thread writes every `every_s` seconds, so no logger or API delays a step or ends the training. A logger's package is imported
when it is used. docs/loggers.md describes what continues after a restart.
"""

from holdfast.integrations.loggers.mlflow import Mlflow, mlflow_run
from holdfast.integrations.loggers.reporter import Reporter, attach
from holdfast.integrations.loggers.sink import Entry, Sink
from holdfast.integrations.loggers.tensorboard import TensorBoard
from holdfast.integrations.loggers.wandb import Wandb, wandb_run

__all__ = ["Entry", "Mlflow", "Reporter", "Sink", "TensorBoard", "Wandb", "attach", "mlflow_run", "wandb_run"]
