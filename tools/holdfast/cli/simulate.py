"""`holdfast simulate`: simulates the production supervisor core with seeded faults, in virtual time."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: [bold]holdfast simulate --seed 42 --trace[/]",
        rich_help_panel="Operate",
    )(simulate)


def simulate(
    seed: Annotated[int, typer.Option(help="Seed of the run; the same seed gives an identical run.")] = 1,
    seeds: Annotated[int, typer.Option(help="Number of consecutive seeds to run.", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="Processes at a time; 0 = one per core.", min=0)] = 0,
    all_worlds: Annotated[
        bool,
        typer.Option(
            "--all-worlds",
            help="Besides worlds with one job, a share of the seeds of each other kind: meshes in any order, allocations that "
            "end, several jobs, idle nodes that test their network.",
        ),
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event and command of the run.")] = False,
    large: Annotated[
        int, typer.Option(help="Simulate one job of this many nodes with 8 ranks each instead.", min=0, max=100_000)
    ] = 0,
    faults: Annotated[int, typer.Option(help="With --large: faults, one after the other.", min=1)] = 20,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints",
            help="With --large: the job saves steps now and then, and recoveries restore them. Takes much longer, "
            "because each node runs its own agent.",
        ),
    ] = False,
) -> None:
    """Simulate the core, detectors, planner and default policy with faults, message loss and crashes; check the invariants."""
    if large:
        from holdfast.sim import large as large_job

        raise typer.Exit(large_job.run(large, faults, seed, checkpoints=checkpoints))
    if checkpoints:
        raise typer.BadParameter("--checkpoints is for one large job: give --large, too")
    from holdfast.sim import worlds  # imports the supervisor's core, which no other command needs
    from holdfast.sim.seeds import run

    if all_worlds and not 0 <= seed <= worlds.SEEDS_END - seeds:
        raise typer.BadParameter(
            f"with --all-worlds, seeds are from 0 to {worlds.SEEDS_END - 1}: choose another --seed, or fewer --seeds"
        )
    chosen = worlds.of_all_kinds(seed, seeds) if all_worlds else range(seed, seed + seeds)
    raise typer.Exit(run(chosen, jobs=jobs, trace=trace))
