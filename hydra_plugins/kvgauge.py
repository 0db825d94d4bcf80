"""The launchers that Hydra finds; harness/launcher.py does the work. Imported by every start of Hydra: nothing heavy here."""

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ProcessLauncher(Launcher):
    """One process per cell, one after the other: conf/hydra/launcher/process.yaml."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from harness import launcher

        jobs = launcher.prepare(self.context, self.config, job_overrides, initial_job_idx)
        return launcher.launch(jobs, self.run)

    def run(self, jobs):
        from harness import launcher

        return launcher.one_after_the_other(jobs)


class RayLauncher(ProcessLauncher):
    """One Ray task per cell: conf/hydra/launcher/ray.yaml."""

    def __init__(self, address: str | None, num_gpus: float, num_cpus: float):
        self.resources = {"address": address, "num_gpus": num_gpus, "num_cpus": num_cpus}

    def run(self, jobs):
        from harness import launcher

        return launcher.on_ray(jobs, **self.resources)
