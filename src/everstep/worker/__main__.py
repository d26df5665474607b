"""`python -m everstep.worker [-m] script args`: one worker, started cold; warm ones are forks of the zygote."""

import os
import sys

from everstep.adapters.workers.processes import die_with_parent
from everstep.adapters.workers.worker_environment import RUN_VARIABLE
from everstep.worker.script import observe, run_script


def main(arguments: list[str]) -> int:
    module = arguments[:1] == ["-m"]
    if os.environ.get(RUN_VARIABLE):
        die_with_parent()
    observe()
    return run_script(arguments[1:] if module else arguments, module=module)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
