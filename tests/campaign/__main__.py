"""`python -m tests.campaign inputs|kills|disks`: docs/reliability.md says what each one shows."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

from transformers.utils.logging import disable_progress_bar

from tests.campaign import disks, kills, workers
from training.report.results import commit, cpu_name


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    campaigns = parser.add_subparsers(dest="campaign", required=True)
    hostile = campaigns.add_parser("inputs", help="hostile input for every reader and loader")
    hostile.add_argument("--count", type=int, default=100_000, help="cases (100,000)")
    hostile.add_argument("--only", default="", metavar="TARGET[/NUMBER]", help="one target, or one case again")
    killed = campaigns.add_parser("kills", help="jobs that are killed and started again")
    killed.add_argument("--kills", type=float, default=float("inf"), help="kills by SIGKILL after which it ends")
    killed.add_argument("--only", default="", metavar="JOB", help="one job")
    faulty = campaigns.add_parser("disks", help="jobs whose writes fail, and torn checkpoints")
    faulty.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th write and size (1)")
    faulty.add_argument(
        "--torn", type=int, default=1000, metavar="N", help="checkpoints with a file that is cut (1,000)"
    )
    faulty.add_argument("--only", default="", metavar="JOB", help="one job, or torn")
    for each in campaigns.choices.values():
        each.add_argument("--hours", type=float, default=1.0, help="the time after which it ends (1)")
        each.add_argument("--seed", type=int, default=1, help="it decides every case (1)")
        each.add_argument("--output", type=Path, metavar="FILE", help="the log, as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign; return 0 if nothing failed, else 1."""
    options = parse_arguments(arguments)
    disable_progress_bar()
    start = time.time()
    log: dict[str, Any] = {"campaign": options.campaign, "seed": options.seed, "commit": commit(), "cpu": cpu_name()}
    log |= {"inputs": workers.run, "kills": kills.run, "disks": disks.run}[options.campaign](options)
    log["seconds"] = round(time.time() - start)
    if options.output is not None:
        options.output.write_text(json.dumps(log, indent=1), encoding="utf-8")
    for failure in log["failures"]:
        print(f"{failure['case']}: {failure['error']}")
    print(f"{log['cases']:,d} cases, {len(log['failures'])} failed, in {log['seconds']} seconds.")
    return 1 if log["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
