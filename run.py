"""KVGauge: what a KV-cache method really costs and saves.

python run.py method=sparda sparsity=0.8                  one cell; the last line of stdout is its row as JSON
python run.py -m method=full,window shape=smoke           a sweep; the last line counts the rows by status
python run.py -m method=full,window plan=only             what the sweep would run
python run.py --help                                      all groups and values
"""

import os
import sys
import traceback

import hydra
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError

from harness.config import CONF, ConfigError, preflight


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> float:
    # imported late: a mistake is reported before the engine is loaded
    from harness import sweep

    return sweep.run_job(cfg)


def cli(argv: list[str]) -> int:
    """Run and return the exit code: 0 fine, 1 a cell failed or nothing can be written, 2 a mistake in the arguments."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    if int(os.environ.get("RANK", 0)):  # of the processes that torchrun starts the first one speaks
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        plan = preflight(argv)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints tracebacks of its own
        return plan.start(main) if plan else main() or 0
    except (ConfigError, OSError, InterpolationResolutionError) as err:
        if before == "1":
            traceback.print_exc()
        mistake = isinstance(err, ConfigError)
        hint = "; try hydra.run.dir=<folder>, with -m hydra.sweep.dir=<folder>"
        print(f"error: {err if mistake else f'results cannot be written: {str(err).splitlines()[0]}{hint}'}", file=sys.stderr)
        return 2 if mistake else 1
    finally:
        os.environ["HYDRA_FULL_ERROR"] = before or "0"


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
