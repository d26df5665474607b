"""Every rank starts a child in a session of its own and trains on; the children sleep for an hour."""

import subprocess
import sys
import time

import torch

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(2000):
    parameter.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.02)
