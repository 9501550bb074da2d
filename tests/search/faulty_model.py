"""A model of tokens that goes wrong in trials, as its environment says, in the fourth microbatch of so many samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import torch
from torch import nn

LEFT_OVER = "left over of a trial"


class Faulty(nn.Module):
    """An embedding and a head. `FAULTS` is a JSON mapping of samples per microbatch to what happens."""

    def __init__(self, vocab: int = 256, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.embedding(input_ids)))
        if self.training and logits.device.type == "cpu" and "FAULTS" in os.environ:
            self.calls += 1
            fault = json.loads(os.environ["FAULTS"]).get(str(len(input_ids)))
            if self.calls == 4 and fault is not None:
                return go_wrong(fault, logits)
        return logits


def go_wrong(fault: str, logits: torch.Tensor) -> torch.Tensor:
    """Do it."""
    match fault:
        case "crash":
            raise ValueError("boom")
        case "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            # In a session of its own: the end of this process does not reach it.
            command = [sys.executable, "-c", "import time; time.sleep(600)", LEFT_OVER]
            subprocess.Popen(command, start_new_session=True)
            time.sleep(600)
    assert fault == "nan"
    return logits * float("nan")
