"""What the processes of a launch tell each other outside of the steps: that they run, and the step at which to stop.

They use the store by which torch's launcher brings them together, so no step waits for it.
"""

import os
import threading
import time
from datetime import timedelta

from accelerate import PartialState
from torch.distributed import Store, TCPStore

SECONDS_BETWEEN = 2.0
SILENCE = 30.0  # seconds after which a process counts as lost; torch's launcher gives the others as long to end
STOP = "vaswani/stop"


def connect() -> TCPStore | None:
    """Return a connection to the store of the launch; None for one process, or a launch without an address."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if PartialState().num_processes == 1 or address is None or port is None:
        return None
    return TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SILENCE))


class LaunchWatch(threading.Thread):
    """A thread that ends this process if another one of the launch has stopped, or its machine is gone.

    A process that has died ends the others without it: torch's launcher sees that. A stopped one, or a lost machine,
    would let them wait for hours.

    Args:
        store: a connection for this thread only.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(daemon=True, name="launch watch")
        self.store = store
        self.rank, self.count = PartialState().process_index, PartialState().num_processes

    def run(self) -> None:
        """Count the looks at which a process has not run, not the time: a launch may be suspended as a whole."""
        seen: dict[int, tuple[int, int]] = {}
        while True:
            try:
                self.store.add(f"vaswani/{self.rank}", 1)
                beats = [self.store.add(f"vaswani/{rank}", 0) for rank in range(self.count)]
            except RuntimeError:  # the launch has ended
                return
            for rank, beat in enumerate(beats):
                before, looks = seen.get(rank, (beat, 0))
                seen[rank] = beat, looks + 1 if beat == before else 0
                if seen[rank][1] * SECONDS_BETWEEN > SILENCE:
                    problem = f"Process {rank} of the launch has not run for {SILENCE:.0f} seconds"
                    os.write(2, f"{problem}; the launch ends, and the same command resumes it.\n".encode())
                    os._exit(1)
            time.sleep(SECONDS_BETWEEN)


class AgreedStop:
    """The step at which all processes of a launch stop, which the first one that gets a signal names.

    Gradients are summed over all processes, so no process ends a step before every other one has begun it. A step on
    an accelerator may still run while the host begins the next one. So the step after the next one is early enough for
    the slowest process to hear of it.
    """

    def __init__(self) -> None:
        self.store = connect()
        self.step: int | None = None

    def request(self, step: int) -> None:
        """Ask for a stop as soon as all processes can agree on it."""
        if self.store is None:
            self.step = step
        else:
            self.store.compare_set(STOP, "", str(step + 2))

    def is_requested(self) -> bool:
        """Return whether a process has asked for a stop, which may be due later."""
        if self.store is not None and self.step is None and self.store.check([STOP]):
            self.step = int(self.store.get(STOP))
        return self.step is not None

    def is_due(self, step: int) -> bool:
        """Return whether all processes stop at the end of this step."""
        return self.is_requested() and step >= (self.step or 0)
